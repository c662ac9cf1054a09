"""Peak memory of a rank, over its whole life and in steady state.

CUDA's allocator keeps peaks itself; on the CPU live tensors are tracked. Pages of the process stand beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from bench.measure.facts import of_one
from bench.measure.memory.section import MemorySection
from bench.measure.memory.trackers import AllocationTracker, CudaTracker
from bench.measure.rank_pass import Measurement, RankPass
from bench.ranks.memory_limit import process_bytes

PeakTracker = AllocationTracker | CudaTracker
"""While it is on, its peaks grow; it may be entered again later."""


class MemoryPass(RankPass):
    """`life` is on while the rank builds and takes its first step, `steady` in a later step."""

    def __init__(self, measurement: Measurement) -> None:
        super().__init__(measurement)
        device, phase = measurement.device, measurement.log.step

        def make() -> PeakTracker:
            return CudaTracker(device, phase) if device.type == "cuda" else AllocationTracker(phase)

        self.base_resident_bytes = process_bytes("VmRSS")
        self.life, self.steady = make(), make()
        self.offloaded_activation_bytes: int | None = None

    def around_building(self) -> AbstractContextManager[Any]:
        return self.life

    def around_first_step(self) -> AbstractContextManager[Any]:
        return self.life

    @contextmanager
    def around_window(self) -> Iterator[None]:
        """On a GPU peaks start anew, and what they were stays part of the life's; those of the window are the
        steady state's, whatever a later step is looked at for.
        """
        if isinstance(self.life, CudaTracker):
            self.life.note(None)
        yield
        if isinstance(self.steady, CudaTracker):
            self.steady.note(None)

    @contextmanager
    def around_inspected_step(self) -> Iterator[None]:
        offload = self.measurement.subject.activation_offload
        before = offload.packed_bytes if offload else 0
        with self.steady:
            yield
        if offload:
            self.offloaded_activation_bytes = offload.packed_bytes - before

    def before_steps(self) -> None:
        self.allocator_settings = _allocator_settings(self.measurement.device)

    def part(self) -> MemorySection:
        """All peaks; the whole life's are at least those of the steady state."""
        trainer = self.measurement.subject.trainer
        longest = max(self.life, self.steady, key=lambda tracker: tracker.peak_bytes)
        taken, kept = self.steady.phases.taken, self.steady.phases.kept
        return MemorySection(
            peak_allocated_bytes=of_one(self.steady.peak_bytes),
            peak_reserved_bytes=of_one(_reserved(self.steady)),
            peak_phase=of_one(self.steady.peak_phase),
            forward_peak_bytes=of_one(taken["forward"]),
            forward_saved_bytes=of_one(kept["forward"]),
            backward_peak_bytes=of_one(taken["backward"]),
            whole_life_allocated_bytes=of_one(longest.peak_bytes),
            whole_life_reserved_bytes=of_one(_reserved(self.life, self.steady)),
            whole_life_phase=of_one(longest.peak_phase),
            peak_resident_bytes=of_one(process_bytes("VmHWM")),
            base_resident_bytes=of_one(self.base_resident_bytes),
            limit_base_bytes=of_one(self.measurement.log.limit_base_bytes),
            allocator_settings=self.allocator_settings,
            offloaded_activation_bytes=of_one(self.offloaded_activation_bytes),
            offloaded_optimizer_bytes=of_one(trainer.engine.offloaded_bytes() if trainer else None),
        )


def _reserved(*trackers: PeakTracker) -> int | None:
    """The most that the allocator held; the CPU's keeps no such count."""
    known = [each.peak_reserved_bytes for each in trackers if isinstance(each, CudaTracker)]
    return max(known, default=None)


def _allocator_settings(device: torch.device) -> dict[str, str] | None:
    """What CUDA's allocator says that it runs with, for the record; None on a CPU."""
    if device.type != "cuda":
        return None
    backend = torch.cuda.memory.get_allocator_backend()
    settings = torch.cuda.memory._snapshot().get("allocator_settings", {}) if backend == "native" else {}
    return {"backend": backend, **{name: str(value) for name, value in settings.items()}}


PASS = MemoryPass
