"""Memory pass on a rank: peak memory over its whole life and in steady state.

CUDA's allocator keeps the peaks itself. On a CPU the pass counts the bytes of live tensors. In both cases it
also records the resident memory of the rank process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from bench.measure.facts import one_rank_list
from bench.measure.memory.section import MemorySection
from bench.measure.memory.trackers import AllocationTracker, CudaTracker
from bench.measure.rank_pass import Measurement, RankPass
from bench.ranks.memory_limit import process_bytes, reset_peak_resident_bytes

PeakTracker = AllocationTracker | CudaTracker
"""Context that records the largest peaks of all times that it is entered."""
EXPLAINED_RISES = 2
"""Rises of tensors to their peak that explain a rise of resident memory. Buffers inside operators, and freed
blocks that malloc keeps, took about one (22 kinds of CPU cells of 1k to 64k)."""


class MemoryPass(RankPass):
    """Pass that tracks building and the first step in `life`, and steady state in `steady`."""

    def __init__(self, measurement: Measurement) -> None:
        super().__init__(measurement)
        device, phase = measurement.device, measurement.log.step

        def new_tracker() -> PeakTracker:
            return CudaTracker(device, phase) if device.type == "cuda" else AllocationTracker(phase)

        self.base_resident_bytes = process_bytes("VmRSS")
        self.life, self.steady = new_tracker(), new_tracker()
        self.offloaded_activation_bytes: int | None = None
        self.peak_resident_bytes = 0
        self.outside_allocator_bytes: int | None = None

    def around_building(self) -> AbstractContextManager[Any]:
        return self.life

    def around_first_step(self) -> AbstractContextManager[Any]:
        return self.life

    @contextmanager
    def around_window(self) -> Iterator[None]:
        """On a GPU, record the peaks so far in `life` and the peaks of the window in `steady`.

        Steady-state peaks on a GPU are thus those of the timed steps. The inspected step adds the peaks by
        phase, and on a CPU it gives all steady-state peaks.
        """
        if isinstance(self.life, CudaTracker):
            self.life.record(None)
        yield
        if isinstance(self.steady, CudaTracker):
            self.steady.record(None)

    @contextmanager
    def around_inspected_step(self) -> Iterator[None]:
        """On a CPU, also record how far resident memory rises beyond what tensors explain."""
        offload = self.measurement.subject.activation_offload
        earlier_bytes = offload.packed_bytes if offload else 0
        self.peak_resident_bytes = process_bytes("VmHWM")
        watches_process = isinstance(self.steady, AllocationTracker) and reset_peak_resident_bytes()
        resident_bytes = process_bytes("VmRSS")
        with self.steady:
            live_bytes = self.steady.peak_bytes
            yield
        if watches_process:
            explained_bytes = resident_bytes + EXPLAINED_RISES * (self.steady.peak_bytes - live_bytes)
            self.outside_allocator_bytes = max(0, process_bytes("VmHWM") - explained_bytes)
        if offload:
            self.offloaded_activation_bytes = offload.packed_bytes - earlier_bytes

    def before_steps(self) -> None:
        self.allocator_settings = _allocator_settings(self.measurement.device)

    def part(self) -> MemorySection:
        """Return all peaks; the whole life includes the steady state, so its peaks are at least as high."""
        trainer = self.measurement.subject.trainer
        highest = max(self.life, self.steady, key=lambda tracker: tracker.peak_bytes)
        phases, spare_bytes = self.steady.phases, self.measurement.subject.spare_bytes
        return MemorySection(
            peak_allocated_bytes=one_rank_list(self.steady.peak_bytes - spare_bytes),
            peak_reserved_bytes=one_rank_list(_peak_reserved_bytes(self.steady)),
            peak_phase=one_rank_list(self.steady.peak_phase),
            forward_peak_bytes=one_rank_list(phases.peak_bytes["forward"]),
            forward_saved_bytes=one_rank_list(phases.saved_bytes["forward"]),
            backward_peak_bytes=one_rank_list(phases.peak_bytes["backward"]),
            whole_life_allocated_bytes=one_rank_list(highest.peak_bytes - spare_bytes),
            whole_life_reserved_bytes=one_rank_list(_peak_reserved_bytes(self.life, self.steady)),
            whole_life_phase=one_rank_list(highest.peak_phase),
            peak_resident_bytes=one_rank_list(max(self.peak_resident_bytes, process_bytes("VmHWM"))),
            outside_allocator_bytes=one_rank_list(self.outside_allocator_bytes),
            base_resident_bytes=one_rank_list(self.base_resident_bytes),
            limit_base_bytes=one_rank_list(self.measurement.log.limit_base_bytes),
            allocator_settings=self.allocator_settings,
            offloaded_activation_bytes=one_rank_list(self.offloaded_activation_bytes),
            offloaded_optimizer_bytes=one_rank_list(trainer.engine.offloaded_bytes() if trainer else None),
        )


def _peak_reserved_bytes(*trackers: PeakTracker) -> int | None:
    """Return the peak bytes that CUDA's allocator reserved; None on a CPU."""
    peaks = [tracker.peak_reserved_bytes for tracker in trackers if isinstance(tracker, CudaTracker)]
    return max(peaks, default=None)


def _allocator_settings(device: torch.device) -> dict[str, str] | None:
    """Return the settings that CUDA's allocator reports; None on a CPU."""
    if device.type != "cuda":
        return None
    backend = torch.cuda.memory.get_allocator_backend()
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {}) if backend == "native" else {}
    return {"backend": backend, **{name: str(value) for name, value in settings.items()}}


PASS = MemoryPass
