"""Peak memory of a rank, over its whole life and in steady state, with the part of the step that reached it.

CUDA's allocator keeps peaks itself; on the CPU live tensors are tracked. Pages of the process stand beside.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

import torch

from bench.passes.facts import of_one
from bench.passes.memory.allocations import AllocationTracker
from bench.passes.memory.phases import PhaseBytes
from bench.passes.memory.section import Memory
from bench.ranks.log import StepPhase
from bench.ranks.memory_limit import process_bytes


class CudaTracker:
    """CUDA's own peaks, read and set back whenever a part of the step ends; waits for nothing."""

    def __init__(self, device: torch.device, phase: StepPhase) -> None:
        self.device = device
        self.phase = phase
        self.peak_bytes = 0
        self.peak_reserved_bytes = 0
        self._phase_bytes = 0
        self.peak_phase: str | None = None
        self.phases = PhaseBytes()

    def __enter__(self) -> Self:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.phases.end(None, 0, torch.cuda.memory_allocated(self.device))
        self.phase.on_change = self.note
        return self

    def __exit__(self, *_: object) -> None:
        self.note(self.phase.name)
        self.phase.on_change = None

    def note(self, phase: str | None) -> None:
        """Take in the peaks since the last time, reached in `phase`."""
        peak_bytes = torch.cuda.max_memory_allocated(self.device)
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        if phase is not None and peak_bytes > self._phase_bytes:
            self._phase_bytes, self.peak_phase = peak_bytes, phase
        self.phases.end(phase, peak_bytes, torch.cuda.memory_allocated(self.device))
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, torch.cuda.max_memory_reserved(self.device))
        torch.cuda.reset_peak_memory_stats(self.device)


PeakTracker = AllocationTracker | CudaTracker
"""While it is on, its peaks grow; it may be entered again later."""


class MemoryWatch:
    """A rank's peaks: `life` is on while it builds and takes its first step, `steady` in a later step."""

    def __init__(self, device: torch.device, phase: StepPhase) -> None:
        def make() -> PeakTracker:
            return CudaTracker(device, phase) if device.type == "cuda" else AllocationTracker(phase)

        self.base_resident_bytes = process_bytes("VmRSS")
        self.device = device
        self.life, self.steady = make(), make()

    @contextmanager
    def window(self) -> Iterator[None]:
        """Around a timed window: nothing of it runs between the steps.

        On a GPU peaks start anew, and what they were stays part of the life's; those of the window are the
        steady state's, whatever a later step is looked at for.
        """
        if isinstance(self.life, CudaTracker):
            self.life.note(None)
        yield
        if isinstance(self.steady, CudaTracker):
            self.steady.note(None)

    def read(self, limit_base_bytes: int | None) -> Memory:
        """All peaks; the whole life's are at least those of the steady state."""
        longest = max(self.life, self.steady, key=lambda tracker: tracker.peak_bytes)
        return Memory(
            peak_allocated_bytes=of_one(self.steady.peak_bytes),
            peak_reserved_bytes=of_one(_reserved(self.steady)),
            peak_phase=of_one(self.steady.peak_phase),
            forward_taken_bytes=of_one(self.steady.phases.taken["forward"]),
            forward_kept_bytes=of_one(self.steady.phases.kept["forward"]),
            backward_taken_bytes=of_one(self.steady.phases.taken["backward"]),
            whole_life_allocated_bytes=of_one(longest.peak_bytes),
            whole_life_reserved_bytes=of_one(_reserved(self.life, self.steady)),
            whole_life_phase=of_one(longest.peak_phase),
            peak_resident_bytes=of_one(process_bytes("VmHWM")),
            base_resident_bytes=of_one(self.base_resident_bytes),
            limit_base_bytes=of_one(limit_base_bytes),
        )


def _reserved(*trackers: PeakTracker) -> int | None:
    """The most that the allocator held; the CPU's keeps no such count."""
    known = [each.peak_reserved_bytes for each in trackers if isinstance(each, CudaTracker)]
    return max(known, default=None)
