"""A rank that fails gives a record with the right status, and the sweep goes on."""

import json
import os
import re
import time

import psutil
import pytest
from rich.console import Console

from analysis.metrics.recorded import as_recorded
from analysis.report import write_report
from bench.store import read_records
from bench.sweep.plan import plan
from bench.sweep.progress import Progress
from bench.sweep.run import run_plan
from tests import faults
from tests.cells import TINY, TWO_CORES, make_raw, run_cell, tiny_cell

FAULTS = {
    faults.raise_in_rank_1: ("error", "a rank that raises"),
    faults.kill_rank_1: ("killed", "SIGKILL"),
    faults.segfault_in_rank_1: ("crashed", "SIGSEGV"),
    faults.leave_rank_1: ("error", "no result"),
    faults.run_out_of_memory_in_rank_1: ("out_of_memory", "MemoryError"),
}


@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_failing_rank_names_itself_and_its_status_and_a_crash_its_place(launcher, tmp_path, fault):
    status, word = FAULTS[fault]
    record, folder = run_cell(launcher, tiny_cell("engine=ddp"), tmp_path, fault)
    assert record.status == status
    assert record.failure.rank == 1
    assert word in f"{record.failure.kind} {record.failure.message}"
    assert record.failure.phase == ("build" if fault is faults.raise_in_rank_1 else "start")
    if fault is faults.segfault_in_rank_1:
        for log in (record.failure.log_tail, (folder / "rank_1.log").read_text()):
            assert "Segmentation fault" in log
            assert "in segfault_in_rank_1" in log


STEPS = ("engine=ddp", "strategy=ulysses", "seq_len=1024", "measure.warmup_steps=2", "measure.steps=2")
ALONE = ("workload=attention", "strategy=ulysses", "seq_len=1024")
NOT_FINITE = {
    faults.lose_numbers_beyond_the_parity_check: (
        STEPS,
        "objective on engine=ddp: the loss is missing or not finite at 1,024 tokens",
    ),
    faults.overflow_a_gradient_in_step_2: (STEPS, "losses: the gradient norm of step 2 is inf"),
    faults.lose_the_loss_of_rank_1_in_step_3: (STEPS, "losses: the loss of step 3 on rank 1 is nan"),
    faults.lose_one_token_between_the_sampled_ones: (
        ALONE,
        "attention: out of a timed call at 1,024 tokens is not finite everywhere",
    ),
    faults.lose_a_row_of_the_value_gradient_under_the_clock: (
        ALONE,
        "attention: dv of a timed call at 1,024 tokens is not finite everywhere",
    ),
    faults.lose_a_row_of_the_value_gradient_while_inspected: (
        ALONE,
        "attention at 1,024 tokens: dv is not finite",
    ),
}


@pytest.mark.parametrize("fault", NOT_FINITE, ids=lambda fault: fault.__name__)
def test_a_number_that_is_not_finite_is_a_wrong_result_that_says_where(launcher, tmp_path, fault):
    words, reason = NOT_FINITE[fault]
    record, _ = run_cell(launcher, tiny_cell(*words), tmp_path, fault)
    assert (record.status, record.reason) == ("wrong_result", reason), record.failure
    assert record.sections["timing"] is None
    assert as_recorded(json.loads(json.dumps(record.to_json(), allow_nan=False))).reason == reason


def test_a_sweep_goes_on_after_a_number_that_is_not_finite_and_reports(launcher, tmp_path):
    strategies = {"local": "ok", "ulysses": "wrong_result", "ring": "ok"}
    raws = [
        make_raw(*TINY, *STEPS, f"strategy={name}", f"sweep_dir={tmp_path}", "cluster.world_size=2")
        for name in strategies
    ]
    fault = faults.lose_numbers_beyond_the_parity_check
    code = run_plan(
        plan(raws, TWO_CORES, single=False),
        launcher,
        Progress(Console(quiet=True)),
        write_report=write_report,
        entry=lambda planned: fault if planned.cell.strategy == "ulysses" else None,
    )
    records = read_records(tmp_path / "records.jsonl")
    assert {r["config"]["strategy"]: r["status"] for r in records} == strategies
    assert code == 1
    wrong = next(r for r in records if r["status"] == "wrong_result")
    assert (wrong["losses"]["loss"][0], wrong["losses"]["grad_norm"][0]) == (None, None)
    assert "the loss is missing or not finite at 1,024 tokens" in (tmp_path / "report.html").read_text()


def test_a_rank_past_the_deadline_is_timed_out_and_gone_and_leaves_its_stack_in_its_log(launcher, tmp_path):
    start, cell = time.monotonic(), tiny_cell("engine=ddp", "measure.timeout_s=3")
    record, folder = run_cell(launcher, cell, tmp_path, faults.sleep_in_rank_1)
    assert record.status == "timed_out"
    assert time.monotonic() - start < 10
    assert not [
        p for p in psutil.Process().children(recursive=True) if p.status() == "sleeping" and _is_rank(p)
    ]
    assert "in sleep_in_rank_1" in (folder / "rank_1.log").read_text()
    assert "most recent call first" in record.failure.log_tail
    waits = "in sleep_in_rank_1 (faults.py:53), while rank 0 waits in init_process_group"
    assert record.reason.startswith(f"rank 1, start: still running at the deadline, {waits}; raise measure")


HANGS = {
    faults.sleep_in_a_step_of_rank_1: r"in sleep_for_an_hour \(faults.py:\d+\)",
    faults.stop_in_a_step_of_rank_1: "stopped by a signal, such as SIGSTOP",
}


@pytest.mark.parametrize("fault", HANGS, ids=lambda fault: fault.__name__)
def test_a_rank_that_does_nothing_is_blamed_with_its_phase_long_before_the_deadline(
    launcher, tmp_path, fault
):
    record, folder = run_cell(launcher, tiny_cell("engine=ddp", "measure.silence_s=2"), tmp_path, fault)
    assert record.status == "timed_out"
    found = f"has done nothing for 2 s, {HANGS[fault]}, while rank 0 waits in all_reduce;"
    assert re.match(f"rank 1, objective forward: {found}", record.reason), record.reason
    assert record.wall_s < 20
    assert "in all_reduce" in (folder / "rank_0.log").read_text()


def _is_rank(process):
    """Ranks lead their own process groups; the fork server and its tracker do not."""
    try:
        return os.getpgid(process.pid) == process.pid
    except ProcessLookupError:
        return False


@pytest.mark.usefixtures("short_grace")
def test_three_faults_in_a_sweep_leave_the_other_cells_ok(launcher, tmp_path):
    entries = {
        256: faults.raise_in_rank_1,
        512: faults.kill_rank_1,
        768: faults.sleep_in_rank_1,
    }
    raws = [
        make_raw(*TINY, "engine=ddp", f"seq_len={n}", f"measure.timeout_s={s}", f"sweep_dir={tmp_path}")
        for n, s in {256: 60, 512: 60, 768: 2, 1024: 60, 1280: 60}.items()
    ]
    reported = []
    code = run_plan(
        plan(raws, TWO_CORES, single=False),
        launcher,
        Progress(Console(quiet=True)),
        write_report=lambda folder: reported.append(folder) is None,
        entry=lambda planned: entries.get(planned.cell.seq_len),
    )
    statuses = {r["config"]["seq_len"]: r["status"] for r in read_records(tmp_path / "records.jsonl")}
    assert statuses == {256: "error", 512: "killed", 768: "timed_out", 1024: "ok", 1280: "ok"}
    assert code == 1
    assert reported == [tmp_path]
