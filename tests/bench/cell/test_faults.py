"""A rank that fails gives a record with the right status, and the sweep goes on."""

import os
import time

import psutil
import pytest
from rich.console import Console

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
    if fault is faults.segfault_in_rank_1:
        for log in (record.failure.log_tail, (folder / "rank_1.log").read_text()):
            assert "Segmentation fault" in log
            assert "in segfault_in_rank_1" in log


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
        write_report=reported.append,
        entry=lambda planned: entries.get(planned.cell.seq_len),
    )
    statuses = {r["config"]["seq_len"]: r["status"] for r in read_records(tmp_path / "records.jsonl")}
    assert statuses == {256: "error", 512: "killed", 768: "timed_out", 1024: "ok", 1280: "ok"}
    assert code == 1
    assert reported == [tmp_path]
