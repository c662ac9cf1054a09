"""Repeats are interleaved; automatic ones go to the two fastest strategies, the longest length first."""

import io

import pytest
from msgspec.structs import replace
from rich.console import Console

from analysis.cells.comparison import FREE_PREFIXES, FREE_SETTINGS
from bench.common.environment import describe_environment
from bench.common.statistics import MAX_PROCESSES, MIN_PROCESSES
from bench.config import AUTO
from bench.plan.plan import plan
from bench.plan.repeats import NOT_COMPARED, interleave
from bench.record.record import Status
from bench.request.device_sections import DEVICE_DEFAULTS
from bench.run import sweep as sweep_run
from bench.run.progress import Progress
from bench.run.sweep import run_plan
from tests.support.cells import TWO_CORES, make_cell, make_raw
from tests.support.records import as_record, make_record, make_timing, read_lines

STRATEGIES = ("ulysses", "ring")
KERNELS = ("torch_flash", "math")


@pytest.fixture
def left_open(monkeypatch):
    """Make `measure.repeats=auto` the default on the CPU, as on a GPU."""
    monkeypatch.setitem(DEVICE_DEFAULTS, "cpu", DEVICE_DEFAULTS["cpu"] | {"repeats": AUTO})


def raws(*words, lengths=("1k", "2k")):
    return [
        make_raw(f"strategy={strategy}", f"seq_len={length}", "sweep_dir=out", *words)
        for length in lengths
        for strategy in STRATEGIES
    ]


def planned(*words, **kwargs):
    return plan(raws(*words, **kwargs), TWO_CORES, single=False)


def records_of(cells, took_s, status="ok", spread=0.0, slower=None):
    """Return a record of each cell, as far as the plan reads it; every second process is slower by `spread`.

    A strategy in `slower` takes that many times as long.
    """

    def step_ms(entry):
        return 100 * (slower or {}).get(entry.cell.strategy, 1) * (1 + spread) ** (entry.repeat % 2)

    return [
        as_record(
            make_record(
                cell_id=entry.cell.cell_id,
                role=entry.role,
                repeat=entry.repeat,
                status=status,
                wall_s=took_s[entry.cell.seq_len],
                config=entry.cell.flat(),
                timing=make_timing([[step_ms(entry)] * 3] * 2, entry.cell.tokens_per_step),
            )
        )
        for entry in cells
    ]


def test_repeats_are_interleaved_and_shuffled_by_seed():
    planned_cells = planned("measure.repeats=6").cells
    assert [entry.order for entry in planned_cells] == [*range(24)]
    for repeat in range(6):
        turn = planned_cells[4 * repeat : 4 * repeat + 4]
        assert {entry.repeat for entry in turn} == {repeat}
        assert len({entry.cell.cell_id for entry in turn}) == 4
    cells = [make_cell(f"seq_len={1024 * number}") for number in range(1, 9)]
    turns = interleave(cells, range(6))
    assert turns == interleave(cells, range(6))
    assert (
        len({tuple(cell.seq_len for cell, repeat in turns if repeat == number) for number in range(6)}) == 6
    )


@pytest.mark.usefixtures("left_open")
def test_auto_repeats_go_to_the_longest_length_in_the_budget():
    first = planned("measure.repeats_budget_s=500")
    assert first.cells[0].cell.measure.repeats == AUTO
    assert [entry.repeat for entry in first.cells] == [0] * 4
    whole = first.with_more_repeats(records_of(first.cells, {1024: 10.0, 2048: 40.0}))
    more = whole.cells[4:]
    for strategy in STRATEGIES:
        repeats = [(e.cell.seq_len, e.repeat) for e in more if e.cell.strategy == strategy]
        assert repeats == [(2048, repeat) for repeat in range(1, 6)]
    assert [entry.order for entry in more] == [*range(4, 14)]
    assert whole.note.endswith(", interleaved, about 7 min")
    done = whole.with_more_repeats(records_of(whole.cells, {1024: 10.0, 2048: 40.0}))
    assert (done.cells, done.open_cells, done.note) == (whole.cells, (), None)  # 1k would not fit


@pytest.mark.usefixtures("left_open")
def test_two_fastest_sequence_parallel_strategies_are_repeated():
    strategies = ("ulysses", "local", "usp", "ring")
    raws = [make_raw(f"strategy={name}", "seq_len=1k", "sweep_dir=out") for name in strategies]
    first = plan(raws, TWO_CORES, single=False)
    records = records_of(first.cells, {1024: 1.0}, slower={"usp": 1.5, "local": 0.1})
    more = first.with_more_repeats(records).cells[4:]
    assert {entry.cell.strategy for entry in more} == {"ulysses", "ring"}
    failed = [replace(r, status=Status.CRASHED) if r.config["strategy"] == "ring" else r for r in records]
    assert {entry.cell.strategy for entry in first.with_more_repeats(failed).cells[4:]} == {"ulysses", "usp"}


@pytest.mark.usefixtures("left_open")
def test_repeats_use_the_best_kernel_of_a_strategy():
    words = ((f"strategy={name}", f"kernel={kernel}") for name in STRATEGIES for kernel in KERNELS)
    raws = [make_raw(*raw_words, "seq_len=1k", "sweep_dir=out") for raw_words in words]
    first = plan(raws, TWO_CORES, single=False)
    records = records_of(first.cells, {1024: 1.0}, slower={"ring": 2})
    more = first.with_more_repeats(records).cells[8:]
    assert {entry.cell.strategy for entry in more} == {*STRATEGIES}
    alone = plan([make_raw("strategy=ring", f"kernel={k}", "seq_len=1k", "sweep_dir=out") for k in KERNELS],
                 TWO_CORES, single=False)  # fmt: skip
    sweep_plan = alone.with_more_repeats(records_of(alone.cells, {1024: 1.0}))
    assert {entry.cell.kernel for entry in sweep_plan.cells[4:]} == {*KERNELS}
    assert "of ring 1k sp 2 math and of ring 1k sp 2 torch_flash" in sweep_plan.note or (
        "of ring 1k sp 2 torch_flash and of ring 1k sp 2 math" in sweep_plan.note
    )


@pytest.mark.usefixtures("left_open")
def test_out_of_memory_repeat_ends_the_repeats():
    first = planned(lengths=("1k",))
    whole = first.with_more_repeats(records_of(first.cells, {1024: 1.0}))
    records = records_of(whole.cells, {1024: 1.0})
    with_loss = [
        replace(record, status=Status.OUT_OF_MEMORY)
        if record.config["strategy"] == "ring" and record.repeat == 1
        else record
        for record in records
    ]
    assert whole.with_more_repeats(with_loss).open_cells == ()


@pytest.mark.usefixtures("left_open")
def test_cells_of_different_work_are_not_repeated():
    words = (("engine=ddp", "strategy=ring"), ("engine=zero3", "strategy=ulysses"))
    raws = [make_raw(*raw_words, "seq_len=1k", "sweep_dir=out") for raw_words in words]
    first = plan(raws, TWO_CORES, single=False)
    assert first.with_more_repeats(records_of(first.cells, {1024: 1.0})).cells == first.cells


def test_not_compared_fields_equal_those_of_the_report():
    compared = {name for name in FREE_SETTINGS if name not in ("cluster", "ring_degree")}
    groups = {group.removesuffix(".") for group in FREE_PREFIXES} - {"strategy"}
    assert compared | groups | {"options"} == NOT_COMPARED


@pytest.mark.usefixtures("left_open")
@pytest.mark.parametrize(("spread", "processes"), [(0.0, 6), (0.05, 6), (0.15, 14), (0.4, MAX_PROCESSES)])
def test_larger_spread_leads_to_more_processes(spread, processes):
    first = planned(lengths=("1k",))
    six = first.with_more_repeats(records_of(first.cells, {1024: 1.0}))
    whole = six.with_more_repeats(records_of(six.cells, {1024: 1.0}, spread=spread))
    assert [entry.repeat for entry in whole.cells] == [n for n in range(processes) for _ in STRATEGIES]
    assert (whole.note or "").startswith(f"measure.repeats=auto: {processes - 6} more") == (processes > 6)
    assert whole.with_more_repeats(records_of(whole.cells, {1024: 1.0}, spread=spread)).cells == whole.cells


@pytest.mark.usefixtures("left_open")
def test_number_of_processes_ignores_the_difference_of_speeds():
    """A test that stops once it likes the difference claims a difference too often."""
    first = planned(lengths=("1k",))
    apart = {"ring": 1.3}
    six = first.with_more_repeats(records_of(first.cells, {1024: 1.0}, spread=0.15, slower=apart))
    whole = six.with_more_repeats(records_of(six.cells, {1024: 1.0}, spread=0.15, slower=apart))
    assert len(whole.cells) == 2 * 14


@pytest.mark.usefixtures("left_open")
def test_budget_limits_the_processes_after_the_first_six():
    first = planned("measure.repeats_budget_s=150", lengths=("1k",))
    six = first.with_more_repeats(records_of(first.cells, {1024: 10.0}))
    whole = six.with_more_repeats(records_of(six.cells, {1024: 10.0}, spread=0.15))
    assert len(whole.cells) == 14
    assert whole.note.startswith("measure.repeats=auto: 1 more processes of")


@pytest.mark.parametrize(
    ("budget_s", "repeated"), [(119, set()), (120, {1024}), (579, {1024}), (580, {2048}), (600, {1024, 2048})]
)
@pytest.mark.usefixtures("left_open")
def test_repeats_keep_the_whole_sweep_within_its_budget(budget_s, repeated):
    sweep_plan = planned(f"measure.repeats_budget_s={budget_s}")
    while sweep_plan.open_cells:
        sweep_plan = sweep_plan.with_more_repeats(records_of(sweep_plan.cells, {1024: 2.0, 2048: 48.0}))
    assert {entry.cell.seq_len for entry in sweep_plan.cells[4:]} == repeated


@pytest.mark.parametrize(("words", "processes"), [((), 1), (("measure.repeats=3",), 3)])
def test_fixed_repeats_ignore_the_budget_and_auto_is_1_on_cpu(words, processes):
    sweep_plan = planned(*words)
    assert len(sweep_plan.cells) == 4 * processes
    assert (sweep_plan.open_cells, sweep_plan.note) == ((), None)
    assert sweep_plan.with_more_repeats(records_of(sweep_plan.cells, {1024: 1.0, 2048: 1.0})) is sweep_plan


@pytest.fixture
def swept(tmp_path, monkeypatch):
    """Return a function that runs a sweep whose cells take no time: (output, [(length, repeat) in order])."""
    ran, failing = [], []

    def run_cell(entry, sweep, _):
        ran.append((entry.cell.seq_len, entry.repeat))
        status = "crashed" if entry.cell.strategy in failing else "ok"
        (record,) = records_of([entry], {1024: 10.0, 2048: 40.0}, status=status)
        sweep.store.append(replace(record, environment=describe_environment({})))
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
        sweep_plan = planned(f"sweep_dir={tmp_path}", *words, **kwargs)
        code = run_plan(sweep_plan, Idle(), Progress(Console(file=out, width=200)), write_report=write_report)
        assert code == (1 if fails else 0)
        return out.getvalue(), [*ran]

    return sweep


LONGEST_ONLY = "measure.repeats_budget_s=500"


@pytest.mark.usefixtures("left_open")
def test_sweep_runs_repeats_after_all_first_runs_and_resumes(swept, tmp_path):
    output, ran = swept(LONGEST_ONLY)
    assert sorted(ran[:4]) == [(1024, 0), (1024, 0), (2048, 0), (2048, 0)]
    assert ran[4:] == [(2048, repeat) for repeat in range(1, MIN_PROCESSES) for _ in STRATEGIES]
    assert "checkpointing=auto: off for CPU ranks" in output
    assert "2k sp 2, interleaved, about 7 min" in output
    assert (tmp_path / "config.yaml").read_text().count("seq_len: 2048") == 12
    lines = (tmp_path / "records.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 14
    (tmp_path / "records.jsonl").write_text("".join(lines[:7]))
    output, ran = swept(LONGEST_ONLY, "resume=true")
    assert len(ran) == 7
    assert swept(LONGEST_ONLY, "resume=true")[0].startswith("nothing is missing")


@pytest.mark.usefixtures("left_open")
@pytest.mark.parametrize("words", [("measure.repeats=6",), ("measure.repeats_budget_s=2000",)])
def test_resume_adds_repeats_for_a_number_or_larger_budget(swept, words):
    _, ran = swept("measure.repeats_budget_s=1")
    assert len(ran) == 4
    _, ran = swept(*words, "resume=true")
    assert sorted(ran) == sorted(
        (n, repeat) for n in (1024, 2048) for repeat in range(1, 6) for _ in STRATEGIES
    )


@pytest.mark.usefixtures("left_open")
def test_failed_cell_is_not_repeated_but_resumed(swept):
    _, ran = swept(fails=["ring"])
    assert sorted(ran) == [(1024, 0), (1024, 0), (2048, 0), (2048, 0)]
    _, ran = swept("resume=true")
    assert sorted(ran[:2]) == [(1024, 0), (2048, 0)]


def test_out_of_memory_cell_is_not_repeated(launcher, tmp_path):
    words = ("engine=ddp", "strategy=local", f"sweep_dir={tmp_path}", "measure.repeats=3")
    tiny = (
        "measure.steps=1",
        "measure.warmup_steps=0",
        "measure.trace=false",
        "cluster.memory_limit_gib=0.1",
    )
    sweep_plan = plan(
        [make_raw(*words, *tiny, f"seq_len={n}") for n in ("256", "96k")], TWO_CORES, single=False
    )
    progress = Progress(Console(file=io.StringIO()))
    run_plan(sweep_plan, launcher, progress, write_report=lambda _: True)
    records = read_lines(tmp_path / "records.jsonl")
    ran = [(record["config"]["seq_len"], record["status"]) for record in records]
    assert sorted(ran) == [(256, "ok")] * 3 + [(98304, "out_of_memory")]


def test_report_is_written_after_the_first_length_and_at_the_end(swept):
    counts = []

    def write_report(folder):
        counts.append(len(read_lines(folder / "records.jsonl")))
        if len(counts) == 1:
            raise ValueError("a figure failed")
        return True

    output, ran = swept(write_report=write_report)
    assert (len(ran), counts) == (4, [2, 4])
    assert "no report yet: a figure failed" in output
    counts.clear()
    swept("measure.repeats=2", "resume=true", lengths=["1k"], write_report=lambda _: counts.append(1) or True)
    assert counts == [1]  # all cells have the same length
