"""Progress prints the right text at the right time, in a terminal and in a log."""

import io
from pathlib import Path

import pytest
from msgspec import structs
from rich.console import Console

from bench.common.labels import duration_label
from bench.plan.cell_labels import CellLabels
from bench.plan.estimate import IMPORTING_PACKAGES, Estimate, ExpectedStep
from bench.plan.planned import PlannedCell, planned_cell
from bench.ranks.log import RankStage
from bench.run.cell.run import run
from bench.run.progress import HEARTBEAT_S, Progress
from tests.support.cells import TWO_CORES, make_cell, tiny_cell
from tests.support.faults import acts

WORDS = ("seq_len=64k", "measure.steps=20", "measure.budget_s=1000")
SHORT = PlannedCell(tiny_cell("strategy=ring", "seq_len=1k", "cluster.world_size=2"), 0, 0)
LONG = PlannedCell(tiny_cell("strategy=local", "engine=ddp", *WORDS), 0, 0)


class Clock:
    """Clock that the test moves."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def log(tmp_path):
    """Return a log file in memory, the Progress that writes it, and the clock."""
    output, clock = io.StringIO(), Clock()
    progress = Progress(Console(file=output, width=80), clock)
    progress.start([LONG], tmp_path)
    output.truncate(output.seek(0))
    return output, progress, clock


def test_refused_cell_takes_no_time_and_its_reason_is_no_markup(tmp_path):
    planned = planned_cell(tiny_cell("strategy=ulysses", "cluster.world_size=3"), TWO_CORES)
    record = structs.replace(
        run(planned, None, tmp_path), reason="[enforce fail at alloc_cpu.cpp:127] no room"
    )
    output = io.StringIO()
    guess = Estimate(lambda _: ExpectedStep(2.0, "a guess"))
    progress = Progress(Console(file=output, width=200), estimate=guess)
    progress.start([planned], tmp_path)
    progress.begin(planned)
    assert progress._eta() == "about 0 s left"
    progress.end(planned, record)
    progress.stop()
    assert "[enforce fail at alloc_cpu.cpp:127] no room" in output.getvalue()


def test_log_gets_a_line_a_minute_while_a_long_cell_runs(log):
    output, progress, clock = log
    progress.begin(LONG)
    progress.on_stage(RankStage("timing", None, 20, step_s=12.0))
    for _ in range(int(HEARTBEAT_S) - 1):
        clock.now_s += 1
        progress.on_tick()
    assert output.getvalue() == ""
    for _ in range(120):
        clock.now_s += 1
        progress.on_tick()
    first, second = output.getvalue().splitlines()
    assert first.startswith("[1/1] local 64k: running for 60 s, timing, step about 6/20; about ")
    assert second.startswith("[1/1] local 64k: running for 2 min, timing, step about 11/20; about ")


def test_time_left_shrinks_with_the_clock_until_the_cell_is_late(log):
    _, progress, clock = log
    progress.begin(LONG)
    assert progress._eta() == "time left unknown"
    progress.on_stage(RankStage("timing", None, 20, step_s=30.0))
    assert progress._eta() == "about 11 min left"  # includes the first and the inspected step
    clock.now_s += 5 * 60
    assert progress._eta() == "about 6 min left"
    clock.now_s += 60 * 60
    assert progress._eta() == "at least 0 s left, this cell is 54 min late"


def test_progress_says_that_the_first_ranks_wait_for_imports(log):
    _, progress, _ = log
    for where in (f"starting, {IMPORTING_PACKAGES}", "starting"):
        progress.begin(LONG)
        assert progress._cell_progress.stage_label() == where
        progress.on_stage(RankStage("join"))


def test_a_reference_is_shown_but_its_steps_teach_nothing(log):
    _, progress, _ = log
    with progress.show_reference(SHORT) as listener:
        listener.on_stage(RankStage("timing", None, 20, step_s=30.0))
        assert progress._place() == "ring 1k sp 2 as a reference"
    assert (progress._eta(), progress._label()) == ("time left unknown", "")


@pytest.mark.usefixtures("short_grace")
def test_a_failed_cell_names_its_log(launcher, tmp_path):
    planned = PlannedCell(tiny_cell("engine=ddp"), repeat=0, order=0)
    output = io.StringIO()
    progress = Progress(Console(file=output))
    progress.start([planned], tmp_path)
    progress.begin(planned)
    progress.end(planned, run(planned, launcher, tmp_path / "cells", entry=acts.raise_in_rank_1))
    line = output.getvalue().splitlines()[-1]
    assert "error: rank 1, build: ValueError: a rank that raises" in line
    log = line.split("log: ")[1].split(";")[0]
    assert "ValueError: a rank that raises" in Path(log).read_text()


@pytest.mark.parametrize(
    ("seconds", "label"),
    [(0.2, "0 s"), (119, "119 s"), (170, "3 min"), (7140, "119 min"), (7500, "2 h 05 min")],
)
def test_duration_label_rounds_like_a_guess(seconds, label):
    assert duration_label(seconds) == label


@pytest.mark.parametrize(
    ("commands", "labels"),
    [
        ([["seq_len=1k"], ["seq_len=2k"]], ["ulysses 1k sp 2", "ulysses 2k sp 2"]),
        ([["engine=ddp"], ["engine=fsdp2"]], ["ulysses 8k sp 2 ddp", "ulysses 8k sp 2 fsdp2"]),
        ([["batch=1"], ["batch=2"]], ["ulysses 8k sp 2 batch=1", "ulysses 8k sp 2 batch=2"]),
        ([["seed=0"], ["seed=0", "strategy=local"]], ["ulysses 8k sp 2", "local 8k"]),
        (
            [["+env.NCCL_ALGO=Ring"], ["+env.NCCL_ALGO=Tree"]],
            ["ulysses 8k sp 2 env.NCCL_ALGO=Ring", "ulysses 8k sp 2 env.NCCL_ALGO=Tree"],
        ),
    ],
)
def test_cell_labels_name_only_what_sets_a_cell_apart(commands, labels):
    cells = [make_cell("strategy=ulysses", "cluster.world_size=2", *words) for words in commands]
    cell_labels = CellLabels(cells)
    assert [cell_labels.label(cell) for cell in cells] == labels


def test_cell_labels_omit_derived_settings_and_repeats():
    cells = [make_cell("strategy=ulysses", "sp_degree=2", f"cluster.world_size={n}") for n in (2, 4)]
    assert CellLabels(cells).label(cells[1]) == "ulysses 8k sp 2 cluster.world_size=4"
    assert CellLabels([cells[0], cells[0]]).label(cells[0]) == "ulysses 8k sp 2"
