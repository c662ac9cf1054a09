import pytest

from analysis.cells.cells import SHARED_GPU_CAVEAT
from analysis.compare import MAX_LISTED, cell_changes, main
from analysis.read.archive import read_archive
from bench.common.environment import REPOSITORY
from tests.support.records import (
    SHARED_GPU,
    grid,
    make_failure,
    make_predicted,
    make_record,
    make_timing,
    write_sweep,
)

ENVIRONMENT = make_record()["environment"]


def timed(ms, **overrides):
    """A cell whose steps take about `ms`, some a little more and some a little less."""
    step_times = [ms * (1 + 0.01 * (step % 5 - 2)) for step in range(20)]
    return make_record(timing=make_timing([step_times] * 2), **overrides)


def sweeps(before_ms, after_ms, count=6, *, interleaved=True):
    """Return two sweeps of one cell, interleaved or one after the other."""
    every = [f"2026-01-01T00:{minute:02d}:00+00:00" for minute in range(2 * count)]
    starts = (every[::2], every[1::2]) if interleaved else (every[:count], every[count:])
    return [
        [timed(ms * (1 + 0.01 * (n % 3)), repeat=n, started_at=start) for n, start in enumerate(own)]
        for ms, own in zip((before_ms, after_ms), starts, strict=True)
    ]


@pytest.fixture
def written(tmp_path):
    """Two lists of records to two sweeps' folders."""
    return lambda *sides: [write_sweep(tmp_path / str(number), each) for number, each in enumerate(sides)]


@pytest.fixture
def outcomes(written):
    """Return a function that gives the outcomes of comparing two lists of records."""

    def compare(before, after):
        archives = (read_archive([folder], {}) for folder in written(before, after))
        return [change.outcome for change in cell_changes(*archives)]

    return compare


@pytest.fixture
def printed(written, capsys, monkeypatch):
    """Return a function that gives the printed comparison of two lists of records."""
    monkeypatch.setenv("COLUMNS", "200")

    def compare(before, after):
        assert main([*map(str, written(before, after))]) == 0
        return capsys.readouterr().out

    return compare


@pytest.mark.parametrize(
    ("after_ms", "count", "interleaved", "outcome"),
    [
        (80, 6, True, "faster"),
        (125, 6, True, "slower"),
        (100.5, 6, True, "no clear difference"),
        (10, 5, True, "undecided: 5 processes each"),
        (10, 6, False, "undecided: the runs were not interleaved"),
    ],
)
def test_outcome_is_faster_slower_level_or_undecided(outcomes, after_ms, count, interleaved, outcome):
    assert outcomes(*sweeps(100, after_ms, count, interleaved=interleaved)) == [outcome]


def test_undecided_cell_has_both_rates_and_no_ratio(printed):
    text = printed([timed(100)], [timed(50)])
    assert "81,920, 163,840" in text
    assert "2.000" not in text
    assert "interleave both sweeps" in text
    assert "(about 36 s)" in text
    decided = printed(*sweeps(200, 100))
    assert "interleave both" not in decided
    assert "2.000 " in decided


def test_row_has_load_and_notes_next_to_the_ratio(printed):
    unsteady = make_timing([[100.0, 300.0] * 10] * 2)
    busy = {"telemetry": {"load_average": 9.5}, "environment": ENVIRONMENT | {"cores": 2}}
    before, after = [record | {"timing": unsteady} for record in sweeps(100, 50)[0]], sweeps(100, 50)[1]
    after[3] |= busy
    (line,) = [line for line in printed(before, after).splitlines() if "faster" in line and "ulysses" in line]
    assert "before: very unstable; after: the machine was busy" in line
    assert "?, 9.50" in line


def test_outcome_of_a_cell_that_fails_is_its_status(outcomes):
    failed = make_failure("out_of_memory", "no room")
    assert outcomes([timed(100)], [failed]) == ["was ok, is OOM"]
    assert outcomes([failed], [failed]) == ["OOM in both"]
    assert outcomes([timed(100)], [timed(50), make_failure("killed", "no", repeat=1)]) == [
        "was ok, is killed"
    ]


def test_different_provenances_are_not_compared(outcomes):
    assert outcomes([timed(100)], [timed(50, provenance="replayed")]) == []


def test_synthetic_records_are_not_compared(outcomes):
    made = {"provenance": "synthetic"}
    assert outcomes([timed(100, **made)], [timed(50, **made)]) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"git_commit": "abc"}, "git_commit differs: not recorded before, abc after"),
        ({"packages": {"torch": "2.14.0"}}, "torch differs: 2.13.0 before, 2.14.0 after"),
        ({"device_name": "other"}, "device_name differs: NVIDIA H100 80GB HBM3 before, other after"),
        ({"inherited_env": {"NCCL_ALGO": "Ring"}}, "NCCL_ALGO differs: not recorded before, Ring after"),
    ],
)
@pytest.mark.fault(19)
def test_environment_differences_are_named(printed, change, said):
    assert said in printed([timed(100)], [timed(100, environment=ENVIRONMENT | change)])


def test_caveat_where_ranks_share_a_gpu(printed):
    shared, alone = [timed(100.0, config=SHARED_GPU)], [timed(100.0)]
    assert SHARED_GPU_CAVEAT in printed(shared, shared)
    plain = printed(alone, alone)
    assert SHARED_GPU_CAVEAT not in plain
    assert "differs" not in plain


def test_cells_of_one_side_are_listed_up_to_a_maximum(printed):
    text = printed(grid(["local", "ring"], [8192]), grid(["ring", "usp"], [8192]))
    assert "only before: 1 cell\n  local, " in text
    assert "undecided: one process each: 1" in text
    text = printed([], grid(["ring"], range(1, MAX_LISTED + 4)))
    assert "no cell is in both sweeps" in text
    assert f"only after: {MAX_LISTED + 3} cells\n  ring, " in text
    assert "and 3 more cells" in text


def test_bad_input_is_one_line_and_exit_code_2(tmp_path, capsys):
    good = write_sweep(tmp_path / "good", [make_record()])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "records.jsonl").write_text("{broken}\n")
    for bad in ("missing", "broken"):
        assert main([str(good), str(tmp_path / bad)]) == 2
        error = capsys.readouterr().err
        assert len(error.splitlines()) == 1
        assert str(tmp_path / bad) in error


def test_predictions_are_compared_without_processes(outcomes, printed):
    before, after = make_predicted(), make_predicted(step_ms=(80.0, 101.0, 125.0))
    assert outcomes([before], [before]) == ["predicted the same"]
    assert outcomes([before], [after]) == ["predicted differently"]
    said = printed([before], [after])
    assert "0.990" in said
    assert "processes on each side" not in said
    assert "To decide" not in said


@pytest.fixture
def gate(written, capsys):
    """Return a function that gives exit code and last printed line of the gate at 5 %."""

    def run(before, after):
        code = main([*map(str, written(before, after)), "--fail-if-slower", "5%"])
        return code, capsys.readouterr().out.splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("after_ms", "count", "code"), [(80, 6, 0), (100, 6, 0), (125, 6, 1), (105, 6, 3), (125, 5, 3)]
)
def test_gate_decides_by_the_whole_interval(gate, after_ms, count, code):
    assert gate(*sweeps(100, after_ms, count))[0] == code


@pytest.mark.parametrize(
    ("status", "code"), [("out_of_memory", 1), ("wrong_result", 1), ("timed_out", 1), ("interrupted", 3)]
)
def test_gate_fails_if_a_cell_that_was_ok_fails(gate, status, code):
    before, after = sweeps(100, 50)
    assert gate(before, [*after[:5], make_failure(status, "no", repeat=5)])[0] == code


def test_gate_does_not_compare_devices(gate):
    before, after = sweeps(100, 200)
    other = [record | {"environment": ENVIRONMENT | {"device_name": "other"}} for record in after]
    assert gate(before, other)[0] == 3


def test_gate_needs_every_cell_that_was_before(gate):
    before, after = sweeps(100, 100)
    code, line = gate([*before, *grid(["local"], [4096])], after)
    assert (code, line) == (3, "--fail-if-slower 5%: undecided (1 passed, 0 slower, 1 undecided)")


def test_gate_of_the_reference_with_itself_is_undecided(capsys):
    folder = str(REPOSITORY / "results" / "reference" / "cpu")
    assert main([folder, folder, "--fail-if-slower", "5%"]) == 3  # one process each
    assert "undecided (0 passed, 0 slower, 9 undecided)" in capsys.readouterr().out


def test_gate_refuses_sweeps_without_a_common_cell(gate, written, capsys):
    folders = written(grid(["local"], [8192]), grid(["ring"], [8192]))
    assert main([*map(str, folders), "--fail-if-slower", "5%"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.parametrize("value", ["5", "0.05", "-3%", "100%", "nan%", "%"])
def test_gate_refuses_what_is_no_percentage(written, capsys, value):
    folders = written([make_record()], [make_record()])
    assert main([*map(str, folders), f"--fail-if-slower={value}"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
