"""Peak tensor memory on a CPU is counted to the byte."""

import json
import os
from functools import partial

import numpy as np
import pytest
import torch

from bench.cost.memory import memory_need
from bench.measure.memory.trackers import AllocationTracker
from bench.measure.workloads.workload import Workload
from bench.ranks.log import StepPhase
from bench.run.node.worker import run_cell as run_in_rank
from bench.training.engines import ENGINE_FACTS
from tests.support.cells import CHECKS, run_cell, tiny_cell
from tests.support.faults.classes import memory
from tests.support.faults.classes.tampering import run_with_fault

MIB = 2**20


def mib(count):
    return torch.zeros(count * MIB, dtype=torch.uint8)


def test_storages_count_while_they_hold_memory():
    """Views cost nothing, freed memory does not add up, and storages that exist on entry count."""
    existing = mib(4)
    with AllocationTracker() as tracker:
        start = tracker.peak_bytes
        views = [existing[i:] for i in range(10)]
        for _ in range(3):
            block = mib(8)
            del block
        emptied = mib(8)
        emptied.untyped_storage().resize_(0)
        other = mib(8)
    assert len(views) == 10
    assert start >= existing.nbytes
    assert tracker.peak_bytes - start == other.nbytes


def test_peak_phase_is_the_phase_that_first_reached_the_peak():
    phase = StepPhase()
    with AllocationTracker(phase) as tracker:
        for name, size in {"forward": 4, "backward": 8, "optimizer": 8}.items():
            phase.enter(name)
            block = mib(size)
            del block
    assert tracker.peak_phase == "backward"


@pytest.mark.parametrize(
    ("fault", "outside_mib"),
    [(memory.fill_an_array_before_building, 0), (memory.fill_an_array_in_every_call, 200)],
)
def test_memory_that_no_tensor_explains_is_recorded(launcher, tmp_path, fault, outside_mib):
    """Arrays have 200 MiB. They all count in the resident peak of the whole life."""
    cell = tiny_cell("strategy=ulysses", "cluster.world_size=2")
    record, _ = run_cell(launcher, cell, tmp_path, partial(run_with_fault, fault), without=CHECKS)
    assert record.status == "ok", record.reason
    assert record.memory.outside_allocator_bytes == pytest.approx([outside_mib * MIB] * 2, abs=30 * MIB)
    resident = np.subtract(record.memory.peak_resident_bytes, record.memory.base_resident_bytes)
    assert min(resident) > 180 * MIB


def compare_with_the_profiler(job, log):
    """Write the tracker's and the profiler's peak of the same step to the rank's folder."""

    def mark(phase):
        with torch.profiler.record_function(f"end of {phase}"):
            pass

    def compare(workload, _):
        workload.step(0)
        log.step.on_change = mark
        with AllocationTracker() as start:
            alive_bytes = start.peak_bytes
        tracker = AllocationTracker(log.step)
        with torch.profiler.profile(profile_memory=True) as profiler, tracker:
            workload.step(1)
        path = job.folder / f"{job.rank}.trace"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
        allocated = [(e["args"]["Total Allocated"], e["ts"]) for e in events if e.get("name") == "[memory]"]
        growth, peak_ts = max(allocated)
        ends = sorted((e["ts"], e["name"]) for e in events if str(e.get("name")).startswith("end of "))
        phase = next(name.removeprefix("end of ") for ts, name in ends if ts > peak_ts)
        peaks = [[tracker.peak_bytes, tracker.peak_phase], [alive_bytes + growth, phase]]
        (job.folder / f"{job.rank}.peaks").write_text(json.dumps(peaks))
        os._exit(0)

    Workload.run = compare
    return run_in_rank(job, log)


@pytest.mark.parametrize("engine", ENGINE_FACTS)
def test_peak_and_phase_of_a_step_match_the_profiler(launcher, tmp_path, engine):
    """One rank, because the profiler misses buffers that a gloo thread frees, and counts them for ever.

    float32, because CPU kernels make no copies within themselves in that dtype.
    """
    cell = tiny_cell("strategy=local", f"engine={engine}", "seq_len=4k", "dtype=fp32")
    launcher.run(cell, tmp_path, entry=compare_with_the_profiler)
    (tracked, phase), (profiled, expected) = json.loads((tmp_path / "0.peaks").read_text())
    assert tracked == pytest.approx(profiled, rel=0.01)
    assert phase == expected == "backward"


MORE_MIB = 1088
"""A size above ZeRO-3's gradient buffer of 953.7 MiB, which exists once the model is built."""


def need_more_while_building(job, log):
    """Allocate memory for a moment while the model is built, as sharding a whole model does."""
    from bench.measure.workloads import train

    open_data = train.open_data

    def wasteful(cell, device):
        mib(MORE_MIB)
        return open_data(cell, device)

    train.open_data = wasteful
    return run_in_rank(job, log)


@pytest.mark.parametrize("engine", ENGINE_FACTS)
def test_whole_life_peak_includes_building(launcher, tmp_path, engine):
    cell = tiny_cell(f"engine={engine}")
    record, _ = run_cell(launcher, cell, tmp_path, need_more_while_building, without=CHECKS)
    assert record.status == "ok", record.reason
    memory = record.memory
    assert set(memory.whole_life_phase) == {"load"}
    for life, steady in zip(memory.whole_life_allocated_bytes, memory.peak_allocated_bytes, strict=True):
        assert life >= MORE_MIB * MIB > steady
    # With so few tokens, optimizer state and whole gradients dominate; the estimate counts them generously.
    assert memory_need(cell).total_bytes == pytest.approx(max(memory.peak_allocated_bytes), rel=0.25)


def test_whole_life_peak_is_at_least_that_of_steady_state(launcher, tmp_path):
    cell = tiny_cell("engine=zero3", "seq_len=8k")
    record, _ = run_cell(launcher, cell, tmp_path, without=CHECKS)
    memory = record.memory
    assert memory.whole_life_allocated_bytes == memory.peak_allocated_bytes
    assert set(memory.peak_phase) == set(memory.whole_life_phase) == {"backward"}
    telemetry = record.telemetry
    assert telemetry.reason == memory.device_used_reason == "no NVML figures: the ranks run on the CPU"
    assert (telemetry.power_w, telemetry.throttled) == (None, None)
    assert telemetry.load_average >= 0
    assert len(telemetry.involuntary_context_switches) == len(telemetry.cpus) == len(memory.peak_phase)


def test_text_of_a_cell_takes_no_tensor_memory(launcher, tmp_path):
    (tmp_path / "long.txt").write_text("words " * 4 * MIB)
    cells = [
        tiny_cell("strategy=local", "engine=ddp", *more) for more in ((), (f"data.path={tmp_path}/long.txt",))
    ]
    records = [run_cell(launcher, cell, tmp_path, without=CHECKS)[0] for cell in cells]
    short, long = (record.memory for record in records)
    assert long.peak_allocated_bytes == short.peak_allocated_bytes
    assert long.whole_life_allocated_bytes == short.whole_life_allocated_bytes
