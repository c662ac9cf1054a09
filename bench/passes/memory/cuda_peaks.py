"""Tensor memory on a GPU, whose allocator keeps peaks itself, with the part of the step that reached one."""

from __future__ import annotations

from typing import Self

import torch

from bench.passes.memory.phases import PhaseBytes
from bench.ranks.log import StepPhase


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
