"""Peak tensor memory on the CPU is counted to the byte."""

import json

import pytest
import torch

from bench.measure.allocations import AllocationTracker
from bench.worker import run_cell as run_in_rank
from tests.cells import tiny_cell

MIB = 2**20


def mib(count):
    return torch.zeros(count * MIB, dtype=torch.uint8)


def test_what_is_freed_before_the_next_block_does_not_add_up():
    with AllocationTracker() as tracker:
        start = tracker.peak_bytes
        for _ in range(3):
            block = mib(8)
            del block
    assert tracker.peak_bytes - start == 8 * MIB


def test_views_are_free_and_what_was_there_before_counts():
    kept = mib(4)
    with AllocationTracker() as tracker:
        start = tracker.peak_bytes
        views = [kept[i:] for i in range(10)]
        more = kept + 1
    assert (len(views), more.nbytes) == (10, 4 * MIB)
    assert start >= 4 * MIB
    assert tracker.peak_bytes - start == 4 * MIB


def test_a_storage_that_is_emptied_stops_counting():
    with AllocationTracker() as tracker:
        start = tracker.peak_bytes
        emptied = mib(8)
        emptied.untyped_storage().resize_(0)
        other = mib(6)
    assert other.nbytes == 6 * MIB
    assert tracker.peak_bytes - start == 8 * MIB


def compare_with_the_profiler(job, log):
    """Writes the tracker's and the profiler's peak of the same step beside the rank's log."""
    import bench.worker

    def both(built, _):
        built.trainer.step(0, built.cell.seq_len)
        with AllocationTracker() as start:
            alive_bytes = start.peak_bytes
        with torch.profiler.profile(profile_memory=True) as profiler, AllocationTracker() as tracker:
            built.trainer.step(1, built.cell.seq_len)
        path = built.folder / f"{job.rank}.trace"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        grown = max(e["args"]["Total Allocated"] for e in events if e.get("name") == "[memory]")
        (built.folder / f"{job.rank}.peaks").write_text(json.dumps([tracker.peak_bytes, alive_bytes + grown]))
        return {}

    bench.worker.run_passes = both
    return run_in_rank(job, log)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero3"])
def test_a_steps_peak_is_the_profilers(launcher, tmp_path, engine):
    """On one rank: buffers that a gloo thread drops are freed unseen by the profiler, and stay in its sum."""
    cell = tiny_cell("strategy=local", "seq_len=4k", f"engine={engine}")
    launcher.run(cell, tmp_path, entry=compare_with_the_profiler)
    tracked, profiled = json.loads((tmp_path / "0.peaks").read_text())
    assert tracked == pytest.approx(profiled, rel=0.01)
