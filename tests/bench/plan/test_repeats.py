"""Repeats are interleaved, and those left open go to the two fastest strategies, the longest length first."""

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from analysis.cells.comparison import FREE, FREE_GROUPS
from bench.common.environment import describe
from bench.common.statistics import MAX_PROCESSES, MIN_PROCESSES
from bench.config import AUTO
from bench.plan.plan import plan
from bench.plan.repeats import NOT_COMPARED, in_turns
from bench.record.record import Status
from bench.request.device_sections import WINDOWS
from bench.run import sweep as sweep_run
from bench.run.progress import Progress
from bench.run.sweep import run_plan
from tests.support.cells import TWO_CORES, make_cell, make_raw
from tests.support.records import as_record, make_record, make_timing, read_lines

STRATEGIES = ("ulysses", "ring")
KERNELS = ("torch_flash", "math")


@pytest.fixture
def left_open(monkeypatch):
    """Repeats are left open, as on a GPU."""
    monkeypatch.setitem(WINDOWS, "cpu", WINDOWS["cpu"] | {"repeats": AUTO})


def raws(*words, lengths=("1k", "2k")):
    return [
        make_raw(f"strategy={strategy}", f"seq_len={length}", "sweep_dir=out", *words)
        for length in lengths
        for strategy in STRATEGIES
    ]


def planned(*words, **kwargs):
    return plan(raws(*words, **kwargs), TWO_CORES, single=False)


def ended(cells, took_s, status="ok", spread=0.0, slower=None):
    """A record of each, as far as the plan reads it; every other process is slower by the spread.

    A strategy in `slower` takes that many times as long.
    """

    def step_ms(each):
        return 100 * (slower or {}).get(each.cell.strategy, 1) * (1 + spread) ** (each.repeat % 2)

    return [
        as_record(
            make_record(
                cell_id=each.cell.cell_id,
                role=each.role,
                repeat=each.repeat,
                status=status,
                wall_s=took_s[each.cell.seq_len],
                config=each.cell.flat(),
                timing=make_timing([[step_ms(each)] * 3] * 2, each.cell.tokens_per_step),
            )
        )
        for each in cells
    ]


def test_every_cell_has_its_turn_before_any_has_its_next_in_another_order_by_the_seed():
    found = planned("measure.repeats=6").cells
    assert [each.order for each in found] == [*range(24)]
    for repeat in range(6):
        turn = found[4 * repeat : 4 * repeat + 4]
        assert {each.repeat for each in turn} == {repeat}
        assert len({each.cell.cell_id for each in turn}) == 4
    cells = [make_cell(f"seq_len={1024 * number}") for number in range(1, 9)]
    turns = in_turns(cells, range(6))
    assert turns == in_turns(cells, range(6))
    assert len({tuple(cell.seq_len for cell, repeat in turns if repeat == each) for each in range(6)}) == 6


@pytest.mark.usefixtures("left_open")
def test_left_open_every_cell_runs_once_and_the_longest_length_that_fits_the_budget_more_often():
    first = planned("measure.repeats_budget_s=500")
    assert first.cells[0].cell.measure.repeats == AUTO
    assert [each.repeat for each in first.cells] == [0] * 4
    whole = first.with_repeats(ended(first.cells, {1024: 10.0, 2048: 40.0}))
    more = whole.cells[4:]
    for strategy in STRATEGIES:
        its = [(e.cell.seq_len, e.repeat) for e in more if e.cell.strategy == strategy]
        assert its == [(2048, repeat) for repeat in range(1, 6)]
    assert [each.order for each in more] == [*range(4, 14)]
    assert whole.note.endswith(", interleaved, about 7 min")
    done = whole.with_repeats(ended(whole.cells, {1024: 10.0, 2048: 40.0}))
    assert (done.cells, done.open_cells, done.note) == (whole.cells, (), None)  # 1k would not fit


@pytest.mark.usefixtures("left_open")
def test_the_two_fastest_strategies_that_split_the_sequence_are_repeated():
    strategies = ("ulysses", "local", "usp", "ring")
    raws = [make_raw(f"strategy={name}", "seq_len=1k", "sweep_dir=out") for name in strategies]
    first = plan(raws, TWO_CORES, single=False)
    records = ended(first.cells, {1024: 1.0}, slower={"usp": 1.5, "local": 0.1})
    more = first.with_repeats(records).cells[4:]
    assert {each.cell.strategy for each in more} == {"ulysses", "ring"}
    failed = [replace(r, status=Status.CRASHED) if r.config["strategy"] == "ring" else r for r in records]
    assert {each.cell.strategy for each in first.with_repeats(failed).cells[4:]} == {"ulysses", "usp"}


@pytest.mark.usefixtures("left_open")
def test_each_strategy_is_repeated_with_its_best_kernel():
    words = ((f"strategy={name}", f"kernel={kernel}") for name in STRATEGIES for kernel in KERNELS)
    first = plan([make_raw(*each, "seq_len=1k", "sweep_dir=out") for each in words], TWO_CORES, single=False)
    records = ended(first.cells, {1024: 1.0}, slower={"ring": 2})
    more = first.with_repeats(records).cells[8:]
    assert {each.cell.strategy for each in more} == {*STRATEGIES}
    alone = plan([make_raw("strategy=ring", f"kernel={k}", "seq_len=1k", "sweep_dir=out") for k in KERNELS],
                 TWO_CORES, single=False)  # fmt: skip
    found = alone.with_repeats(ended(alone.cells, {1024: 1.0}))
    assert {each.cell.kernel for each in found.cells[4:]} == {*KERNELS}
    assert "of ring 1k sp 2 math and of ring 1k sp 2 torch_flash" in found.note or (
        "of ring 1k sp 2 torch_flash and of ring 1k sp 2 math" in found.note
    )


@pytest.mark.usefixtures("left_open")
def test_a_repeat_that_runs_out_of_memory_ends_the_repeats_and_not_the_sweep_in_a_loop():
    first = planned(lengths=("1k",))
    whole = first.with_repeats(ended(first.cells, {1024: 1.0}))
    records = ended(whole.cells, {1024: 1.0})
    lost = [replace(r, status=Status.OUT_OF_MEMORY) if r.config["strategy"] == "ring" and r.repeat == 1 else r
            for r in records]  # fmt: skip
    assert whole.with_repeats(lost).open_cells == ()


@pytest.mark.usefixtures("left_open")
def test_speeds_of_different_work_are_not_compared():
    words = (("engine=ddp", "strategy=ring"), ("engine=zero3", "strategy=ulysses"))
    raws = [make_raw(*each, "seq_len=1k", "sweep_dir=out") for each in words]
    first = plan(raws, TWO_CORES, single=False)
    assert first.with_repeats(ended(first.cells, {1024: 1.0})).cells == first.cells


def test_cells_differ_in_what_the_report_lets_them_differ_in():
    compared = {name for name in FREE if name not in ("cluster", "ring_degree")}
    groups = {group.removesuffix(".") for group in FREE_GROUPS} - {"strategy"}
    assert compared | groups | {"options"} == NOT_COMPARED


@pytest.mark.usefixtures("left_open")
@pytest.mark.parametrize(("spread", "processes"), [(0.0, 6), (0.05, 6), (0.15, 14), (0.4, MAX_PROCESSES)])
def test_processes_that_spread_too_far_to_tell_ten_percent_apart_become_more(spread, processes):
    first = planned(lengths=("1k",))
    six = first.with_repeats(ended(first.cells, {1024: 1.0}))
    whole = six.with_repeats(ended(six.cells, {1024: 1.0}, spread=spread))
    assert [each.repeat for each in whole.cells] == [n for n in range(processes) for _ in STRATEGIES]
    assert (whole.note or "").startswith(f"measure.repeats=auto: {processes - 6} more") == (processes > 6)
    assert whole.with_repeats(ended(whole.cells, {1024: 1.0}, spread=spread)).cells == whole.cells


@pytest.mark.usefixtures("left_open")
def test_the_number_of_processes_never_follows_from_how_far_apart_two_strategies_are():
    """A test that stops where it likes the difference claims one more often than it says."""
    first = planned(lengths=("1k",))
    apart = {"ring": 1.3}
    six = first.with_repeats(ended(first.cells, {1024: 1.0}, spread=0.15, slower=apart))
    whole = six.with_repeats(ended(six.cells, {1024: 1.0}, spread=0.15, slower=apart))
    assert len(whole.cells) == 2 * 14


@pytest.mark.usefixtures("left_open")
def test_of_the_further_processes_as_many_come_as_the_budget_has_room_for():
    first = planned("measure.repeats_budget_s=150", lengths=("1k",))
    six = first.with_repeats(ended(first.cells, {1024: 10.0}))
    whole = six.with_repeats(ended(six.cells, {1024: 10.0}, spread=0.15))
    assert len(whole.cells) == 14
    assert whole.note.startswith("measure.repeats=auto: 1 more processes of")


@pytest.mark.parametrize(
    ("budget_s", "often"), [(119, set()), (120, {1024}), (579, {1024}), (580, {2048}), (600, {1024, 2048})]
)
@pytest.mark.usefixtures("left_open")
def test_the_whole_sweep_stays_within_its_budget(budget_s, often):
    found = planned(f"measure.repeats_budget_s={budget_s}")
    while found.open_cells:
        found = found.with_repeats(ended(found.cells, {1024: 2.0, 2048: 48.0}))
    assert {each.cell.seq_len for each in found.cells[4:]} == often


@pytest.mark.parametrize(("words", "processes"), [((), 1), (("measure.repeats=3",), 3)])
def test_a_number_of_repeats_is_kept_whatever_it_takes_and_on_a_cpu_auto_is_one(words, processes):
    found = planned(*words)
    assert (len(found.cells), found.open_cells, found.note) == (4 * processes, (), None)
    assert found.with_repeats(ended(found.cells, {1024: 1.0, 2048: 1.0})) is found


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Runs a sweep whose cells take no time: what it said, and the (length, repeat) of its cells in order."""
    ran, failing = [], []

    def run_cell(each, sweep, _):
        ran.append((each.cell.seq_len, each.repeat))
        status = "crashed" if each.cell.strategy in failing else "ok"
        (record,) = ended([each], {1024: 10.0, 2048: 40.0}, status=status)
        sweep.store.append(replace(record, environment=describe({})))
        return record.status is Status.OK

    class Idle:
        is_local = True

        def warm(self):
            pass

    monkeypatch.setattr(sweep_run, "_run_cell", run_cell)

    def sweep(*words, fails=(), write_report=lambda _: True, **kwargs):
        ran.clear()
        failing[:] = fails
        out = io.StringIO()
        found = planned(f"sweep_dir={tmp_path}", *words, **kwargs)
        code = run_plan(found, Idle(), Progress(Console(file=out, width=200)), write_report=write_report)
        assert code == (1 if fails else 0)
        return out.getvalue(), [*ran]

    return sweep


LONGEST_ONLY = "measure.repeats_budget_s=500"


@pytest.mark.usefixtures("left_open")
def test_a_sweep_runs_its_repeats_after_the_first_of_all_also_where_it_broke_off(swept, tmp_path):
    said, ran = swept(LONGEST_ONLY)
    assert sorted(ran[:4]) == [(1024, 0), (1024, 0), (2048, 0), (2048, 0)]
    assert ran[4:] == [(2048, repeat) for repeat in range(1, MIN_PROCESSES) for _ in STRATEGIES]
    assert "checkpointing=auto: off for CPU ranks" in said
    assert "2k sp 2, interleaved, about 7 min" in said
    assert (tmp_path / "config.yaml").read_text().count("seq_len: 2048") == 12
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 14
    (tmp_path / "records.jsonl").write_text("".join(lines[:7]))
    said, ran = swept(LONGEST_ONLY, "resume=true")
    assert len(ran) == 7
    assert swept(LONGEST_ONLY, "resume=true")[0].startswith("nothing is missing")


@pytest.mark.usefixtures("left_open")
@pytest.mark.parametrize("words", [("measure.repeats=6",), ("measure.repeats_budget_s=2000",)])
def test_one_process_each_becomes_six_by_a_number_or_a_larger_budget(swept, words):
    _, ran = swept("measure.repeats_budget_s=1")
    assert len(ran) == 4
    _, ran = swept(*words, "resume=true")
    assert sorted(ran) == sorted(
        (n, repeat) for n in (1024, 2048) for repeat in range(1, 6) for _ in STRATEGIES
    )


@pytest.mark.usefixtures("left_open")
def test_a_cell_that_fails_and_one_that_is_left_alone_are_not_repeated_and_resume_runs_what_failed(swept):
    _, ran = swept(fails=["ring"])
    assert sorted(ran) == [(1024, 0), (1024, 0), (2048, 0), (2048, 0)]
    _, ran = swept("resume=true")
    assert sorted(ran[:2]) == [(1024, 0), (2048, 0)]


def test_a_cell_that_ran_out_of_memory_is_not_repeated(launcher, tmp_path):
    words = ("engine=ddp", "strategy=local", f"sweep_dir={tmp_path}", "measure.repeats=3")
    tiny = (
        "measure.steps=1",
        "measure.warmup_steps=0",
        "measure.trace=false",
        "cluster.memory_limit_gib=0.1",
    )
    found = plan([make_raw(*words, *tiny, f"seq_len={n}") for n in ("256", "96k")], TWO_CORES, single=False)
    progress = Progress(Console(file=io.StringIO()))
    run_plan(found, launcher, progress, write_report=lambda _: True)
    ran = [(each["seq_len"], each["status"]) for each in map(_flat, read_lines(tmp_path / "records.jsonl"))]
    assert sorted(ran) == [(256, "ok")] * 3 + [(98304, "out_of_memory")]


def _flat(record):
    return {"seq_len": record["config"]["seq_len"], "status": record["status"]}


def test_after_the_first_length_there_is_a_report_and_one_at_the_end(swept):
    counts = []

    def write_report(folder):
        counts.append(len(read_lines(folder / "records.jsonl")))
        if len(counts) == 1:
            raise ValueError("a figure failed")
        return True

    said, ran = swept(write_report=write_report)
    assert (len(ran), counts) == (4, [2, 4])
    assert "no report yet: a figure failed" in said
    counts.clear()
    swept("measure.repeats=2", "resume=true", lengths=["1k"], write_report=lambda _: counts.append(1) or True)
    assert counts == [1]  # all are of one length
