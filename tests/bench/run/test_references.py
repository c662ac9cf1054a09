"""A sweep without `local` runs it as a reference for the losses of other cells; this run is no result."""

import io
import os
import signal
import threading
import time

import pytest
from rich.console import Console

from bench.plan.local_cells import reference_cells, reference_of
from bench.plan.plan import plan
from bench.plan.planned import planned_cell
from bench.plan.work import MAX_COMPARED_STEPS, work_of
from bench.run.cell.run import SharedSections
from bench.run.progress import Progress
from bench.run.references import FOLDER, References, Trajectories
from bench.run.sweep import run_plan
from tests.support.cells import FOUR_H100, TINY, TWO_CORES, make_cell, make_raw, tiny_cell
from tests.support.records import read_lines

WORDS = ("measure.reference_budget_s=60", "engine=ddp", "strategy=ulysses", "cluster.world_size=2")


@pytest.fixture
def swept(launcher, tmp_path):
    """Return a function that runs a sweep of one cell: exit code, output, records, cell."""

    def sweep(*words):
        output = io.StringIO()
        planned = plan([make_raw(*TINY, *WORDS, f"sweep_dir={tmp_path}", *words)], TWO_CORES, single=False)
        progress = Progress(Console(file=output, width=200))
        code = run_plan(planned, launcher, progress, write_report=lambda _: True)
        path = tmp_path / "records.jsonl"
        records = read_lines(path) if path.exists() else []
        return code, output.getvalue(), records, planned.cells[0].cell

    return sweep


def test_sweep_without_local_runs_it_as_a_reference(swept, tmp_path):
    code, output, records, cell = swept()
    assert code == 0
    assert [record["config"]["strategy"] for record in records] == ["ulysses"]
    losses = records[0]["losses"]
    assert losses["compared_with"] == reference_of(cell).cell_id
    assert losses["compared_steps"] == len(losses["loss"])
    assert output.count("256: local runs first, for at most 60 s") == 1
    assert len([*(tmp_path / FOLDER).iterdir()]) == 1


def test_reference_that_takes_too_long_leaves_the_cell_ok(swept, short_grace):
    code, output, (record,), _ = swept("measure.reference_budget_s=0.01")
    assert (code, record["status"], record["losses"]["compared_with"]) == (0, "ok", None)
    assert "256: local gave no reference, timed_out: " in output


@pytest.mark.usefixtures("sigint_raises")
def test_ctrl_c_during_a_reference_leaves_no_record(swept, tmp_path):
    def interrupt():
        deadline = time.monotonic() + 60
        while not [*tmp_path.glob(f"{FOLDER}/*/rank_0.log")] and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    code, output, records, _ = swept("seq_len=16k", "measure.steps=20", "measure.budget_s=100")
    assert (code, records) == (130, [])
    assert "resume=true" in output.splitlines()[-1]


def lines_before(cell, planned, folder):
    """Return the lines printed just before a cell runs; without a launcher, a reference raises an error."""
    lines = []
    cells = [planned_cell(other, FOUR_H100) for other in planned]
    reference = reference_cells(cells, FOUR_H100).get(work_of(cell))
    if reference is not None:
        References(None, folder, lines.append).run_missing(reference, Trajectories(), SharedSections())
    return lines


def test_no_reference_runs_if_local_is_planned_or_none_is_needed(tmp_path):
    cell, local = tiny_cell(*WORDS), tiny_cell(*WORDS, "strategy=local")
    assert lines_before(cell, [cell, local], tmp_path) == []
    for words in (
        ["measure.reference_budget_s=0"], ["workload=attention"], ["workload=attention", "strategy=local"],
    ):  # fmt: skip
        other = tiny_cell(*WORDS, *words)
        assert lines_before(other, [other], tmp_path) == []
    longer = tiny_cell(*WORDS, "strategy=local", "seq_len=512")
    for planned in ([cell], [cell, longer]):
        with pytest.raises(AttributeError):  # it would run
            lines_before(cell, planned, tmp_path)


def test_reference_that_does_not_fit_is_skipped_with_a_line(tmp_path):
    cell = make_cell("strategy=ulysses", "model=qwen3_4b", "seq_len=96k", machine=FOUR_H100)
    (line,) = lines_before(cell, [cell], tmp_path)
    assert line.startswith("96k: local does not run as a reference, because a rank needs 81")
    assert "may use 79.1 GiB; losses are compared with those of the first sound cell" in line


def test_reference_of_has_one_rank_per_sequence_and_few_steps():
    cell = make_cell(*WORDS, "dp_shard=2", "cluster.world_size=4", "measure.steps=20", "measure.budget_s=20")
    reference = reference_of(cell)
    assert (reference.strategy, reference.sp_degree, reference.cluster.world_size) == ("local", 1, 2)
    assert reference.cluster.threads_per_rank == 2 * cell.cluster.threads_per_rank
    assert (reference.measure.steps, reference.measure.budget_s) == (MAX_COMPARED_STEPS, 30)
    assert (reference.measure.trace, reference.measure.timeout_s) == (False, 60)
    on_a_gpu = reference_of(make_cell("strategy=ulysses", "model=qwen3_4b", machine=FOUR_H100)).measure
    assert (on_a_gpu.steps, on_a_gpu.budget_s, on_a_gpu.warmup_s, on_a_gpu.min_timed_steps) == (20, 90, 0, 0)
    assert on_a_gpu.timeout_s == 180
    # The first step's length is rounded to the layout, so `local` would do other work here.
    assert (
        reference_of(make_cell("strategy=ring", "cluster.world_size=3", "seq_len=6k", "engine=ddp")) is None
    )
