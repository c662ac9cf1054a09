"""A sweep whose first cell is wrong, and ranks past the deadline: other faults are in `fault_matrix`."""

import os
import re
import time
from functools import partial

import psutil
import pytest
from rich.console import Console

from analysis.report import write_report
from bench.store import read_records
from bench.sweep.plan import plan
from bench.sweep.progress import Progress
from bench.sweep.run import run_plan
from tests import faults
from tests.cells import TINY, TWO_CORES, make_raw, run_cell, tiny_cell
from tests.fault_classes.not_finite import lose_what_follows_the_512th_token
from tests.fault_classes.tampering import tampered

STEPS = ("engine=ddp", "strategy=ulysses", "seq_len=1024", "measure.warmup_steps=2", "measure.steps=2")


def test_a_sweep_goes_on_after_a_number_that_is_not_finite_and_reports(launcher, tmp_path):
    strategies = {"ulysses": "wrong_result", "local": "ok"}
    raws = [
        make_raw(*TINY, *STEPS, f"strategy={name}", f"sweep_dir={tmp_path}", "cluster.world_size=2")
        for name in strategies
    ]
    fault = partial(tampered, lose_what_follows_the_512th_token)
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
