"""A rank that fails gives a record with the right status, and the sweep goes on."""

import time

import psutil
import pytest
from rich.console import Console

from bench.cell.launcher import Launcher
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


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_failing_rank_names_itself_and_its_status(launcher, tmp_path, fault):
    status, word = FAULTS[fault]
    record, _ = run_cell(launcher, tiny_cell("engine=ddp"), tmp_path, fault)
    assert record.status == status
    assert record.failure.rank == 1
    assert word in f"{record.failure.kind} {record.failure.message}"


def test_a_rank_past_the_deadline_is_timed_out_and_gone(launcher, tmp_path):
    start = time.monotonic()
    record, _ = run_cell(
        launcher, tiny_cell("engine=ddp", "measure.timeout_s=3"), tmp_path, faults.sleep_in_rank_1
    )
    assert record.status == "timed_out"
    assert time.monotonic() - start < 10
    assert not [
        p for p in psutil.Process().children(recursive=True) if p.status() == "sleeping" and _is_rank(p)
    ]


def test_a_rank_that_crashes_leaves_its_stack_in_its_log(launcher, tmp_path):
    record, folder = run_cell(launcher, tiny_cell("engine=ddp"), tmp_path, faults.segfault_in_rank_1)
    for log in (record.failure.log_tail, (folder / "rank_1.log").read_text()):
        assert "Segmentation fault" in log
        assert "in segfault_in_rank_1" in log


def test_a_rank_that_hangs_leaves_its_stack_in_its_log(launcher, tmp_path):
    run_cell(launcher, tiny_cell("engine=ddp"), tmp_path / "warm", faults.raise_in_rank_1)
    cell = tiny_cell("engine=ddp", "measure.timeout_s=6")
    record, folder = run_cell(launcher, cell, tmp_path, faults.sleep_in_rank_1)
    assert "in sleep_in_rank_1" in (folder / "rank_1.log").read_text()
    assert "most recent call first" in record.failure.log_tail


def _is_rank(process):
    """Ranks lead their own process groups; the fork server and its tracker do not."""
    try:
        import os

        return os.getpgid(process.pid) == process.pid
    except ProcessLookupError:
        return False


def test_tokens_that_are_seen_twice_are_a_wrong_result(launcher, tmp_path):
    record, _ = run_cell(launcher, tiny_cell("engine=ddp"), tmp_path, faults.forget_to_shard_rank_1)
    assert record.status == "wrong_result"
    assert record.sections["timing"] is None
    assert "other tokens" in record.reason


def test_three_faults_in_a_sweep_leave_the_other_cells_ok(tmp_path):
    entries = {
        256: faults.raise_in_rank_1,
        512: faults.kill_rank_1,
        768: faults.sleep_in_rank_1,
    }
    raws = [
        make_raw(*TINY, "engine=ddp", f"seq_len={n}", "measure.timeout_s=8", f"sweep_dir={tmp_path}")
        for n in (256, 512, 768, 1024, 1280)
    ]
    reported = []
    code = run_plan(
        plan(raws, TWO_CORES, single=False),
        Launcher(),
        Progress(Console(quiet=True)),
        write_report=reported.append,
        entry=lambda planned: entries.get(planned.cell.seq_len),
    )
    from bench.store import read_records

    statuses = {r["config"]["seq_len"]: r["status"] for r in read_records(tmp_path / "records.jsonl")}
    assert statuses == {256: "error", 512: "killed", 768: "timed_out", 1024: "ok", 1280: "ok"}
    assert code == 1
    assert reported == [tmp_path]
