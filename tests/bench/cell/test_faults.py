"""Numbers that are not finite, and ranks past the deadline: all other faults are in `fault_matrix`."""

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

STEPS = ("engine=ddp", "strategy=ulysses", "seq_len=1024", "measure.warmup_steps=2", "measure.steps=2")
ALONE = ("workload=attention", "strategy=ulysses", "seq_len=1024")
NOT_FINITE = {
    faults.lose_numbers_beyond_the_parity_check: (
        STEPS,
        "objective on engine=ddp: the losses of 1,024 tokens are not finite on rank 1",
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
    others = ("parity",) if "objective" in reason else ("parity", "objective")  # find none of these
    record, _ = run_cell(launcher, tiny_cell(*words), tmp_path, fault, without=others)
    assert (record.status, record.reason) == ("wrong_result", reason), record.failure
    assert record.sections["timing"] is None
    assert as_recorded(json.loads(json.dumps(record.to_json(), allow_nan=False))).reason == reason


def test_a_sweep_goes_on_after_a_number_that_is_not_finite_and_reports(launcher, tmp_path):
    strategies = {"ulysses": "wrong_result", "local": "ok"}
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
    assert "the losses of 1,024 tokens are not finite on rank 1" in (tmp_path / "report.html").read_text()


@pytest.mark.fault(7)
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
    waits = r"in sleep_in_rank_1 \(faults.py:\d+\), while rank 0 waits in init_process_group"
    assert re.match(f"rank 1, start: still running at the deadline, {waits}; raise measure", record.reason)


def _is_rank(process):
    """Ranks lead their own process groups; the fork server and its tracker do not."""
    try:
        return os.getpgid(process.pid) == process.pid
    except ProcessLookupError:
        return False
