"""Ranges for Nsight Systems: what a rank does, and in it the phase of its step."""

from __future__ import annotations

import torch


class NvtxRanges:
    """One range at a time, from one phase to the next.

    Ranges are ended by number and not nested, as autograd's own thread may begin a phase.
    """

    def __init__(self) -> None:
        self._open: int | None = None

    def enter(self, phase: str, step_phase: str | None) -> None:
        """End the last range and begin `timing backward`, or `build` outside of a step."""
        if self._open is not None:
            torch.cuda.nvtx.range_end(self._open)
        self._open = torch.cuda.nvtx.range_start(" ".join(filter(None, (phase, step_phase))))
