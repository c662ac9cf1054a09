import subprocess
import sys

import numpy as np
import pytest

from analysis.answers.change import changes, speed_ratio
from analysis.cells.cells import SHARED_GPU_CAVEAT
from analysis.compare import MAX_LISTED, main
from analysis.frame.archive import read_archive
from tests.analysis.records import SHARED_GPU, grid, make_failure, make_record, make_timing, write_sweep

ENVIRONMENT = make_record()["environment"]


def timed(ms, *, steps=20, **overrides):
    """A cell whose steps take about `ms`, some a little more and some a little less."""
    step_times = [ms * (1 + 0.01 * (step % 5 - 2)) for step in range(steps)]
    return make_record(timing=make_timing([step_times] * 2), **overrides)


@pytest.fixture
def outcomes(tmp_path):
    """What the comparison of two lists of records finds."""

    def compare(before, after):
        sides = (write_sweep(tmp_path / name, records) for name, records in (("a", before), ("b", after)))
        return [change.outcome for change in changes(*(read_archive([side], {}) for side in sides))]

    return compare


@pytest.fixture
def printed(tmp_path, capsys, monkeypatch):
    """What the command prints of two lists of records."""
    monkeypatch.setenv("COLUMNS", "200")

    def compare(before, after):
        sides = (write_sweep(tmp_path / name, records) for name, records in (("a", before), ("b", after)))
        assert main([*map(str, sides)]) == 0
        return capsys.readouterr().out

    return compare


@pytest.mark.parametrize(
    ("after_ms", "outcome"), [(80, "faster"), (125, "slower"), (100.5, "no clear difference")]
)
def test_a_cell_is_faster_slower_or_neither(outcomes, after_ms, outcome):
    assert outcomes([timed(100)], [timed(after_ms)]) == [outcome]


@pytest.mark.parametrize(("steps", "outcome"), [(5, "no clear difference"), (6, "faster")])
def test_below_six_samples_nothing_is_clear_however_large_the_difference(outcomes, steps, outcome):
    assert outcomes([timed(100)], [timed(10, steps=steps)]) == [outcome]


def test_three_repeats_are_three_samples_however_many_steps_they_have(outcomes):
    sides = [[timed(ms, repeat=repeat) for repeat in range(3)] for ms in (100, 10)]
    assert outcomes(*sides) == ["no clear difference"]


def test_a_cell_that_now_fails_is_neither_slower_nor_left_out(outcomes):
    failed = make_failure("out_of_memory", "no room")
    assert outcomes([timed(100)], [failed]) == ["was ok, is OOM"]
    assert outcomes([failed], [failed]) == ["OOM in both"]
    assert outcomes([timed(100)], [timed(50), make_failure("killed", "no", repeat=1)]) == [
        "was ok, is killed"
    ]


def test_provenances_are_never_compared(outcomes):
    assert outcomes([timed(100)], [timed(50, provenance="replayed")]) == []


def test_the_ratio_is_of_speeds_and_its_interval_holds_it():
    ratio = speed_ratio([200.0, 202.0, 198.0] * 4, [100.0, 101.0, 99.0] * 4)
    assert ratio.value == pytest.approx(2)
    assert 1.9 < ratio.low <= ratio.value <= ratio.high < 2.1


def test_of_equal_sides_about_one_interval_in_twenty_misses_one():
    random = np.random.default_rng(1)
    sides = (np.exp(0.05 * random.standard_normal((2, 20))) for _ in range(300))
    ratios = [speed_ratio(*side) for side in sides]
    missed = sum(ratio.is_above_one or ratio.is_below_one for ratio in ratios)
    assert 0 < missed <= 0.1 * len(ratios)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"git_commit": "abc"}, "git_commit differs: not recorded before, abc after"),
        ({"packages": {"torch": "2.14.0"}}, "torch differs: 2.13.0 before, 2.14.0 after"),
        ({"device_name": "other"}, "device_name differs: NVIDIA H100 80GB HBM3 before, other after"),
        ({"gpus": ["other"] * 2}, "gpus differs"),
    ],
)
def test_another_commit_torch_or_device_is_named(printed, change, said):
    assert said in printed([timed(100)], [timed(100, environment=ENVIRONMENT | change)])


def test_the_same_environment_is_not_remarked_upon(printed):
    assert "differs" not in printed([timed(100)], [timed(90)])


def test_where_ranks_share_a_gpu_the_comparison_says_what_it_is_worth(printed):
    shared, alone = [timed(100.0, config=SHARED_GPU)], [timed(100.0)]
    assert SHARED_GPU_CAVEAT in printed(shared, shared)
    assert SHARED_GPU_CAVEAT not in printed(alone, alone)


def test_cells_of_one_side_alone_are_listed_with_the_side(printed):
    text = printed(grid(["local", "ring"], [8192]), grid(["ring", "usp"], [8192]))
    assert "only before: 1 cell\n  local, " in text
    assert "only after: 1 cell\n  usp, " in text
    assert "no clear difference: 1" in text


def test_of_too_many_cells_of_one_side_the_rest_is_counted(printed):
    text = printed([], grid(["ring"], range(1, MAX_LISTED + 4)))
    assert "no cell is in both sweeps" in text
    assert f"only after: {MAX_LISTED + 3} cells" in text
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


def test_the_command_exists_and_wants_two_folders():
    done = subprocess.run(
        [sys.executable, "-m", "analysis.compare", "one"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "AFTER" in done.stderr
