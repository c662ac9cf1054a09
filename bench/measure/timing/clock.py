"""Step times from CUDA events on a GPU and from a monotonic clock on a CPU, without added synchronisation."""

from __future__ import annotations

import time
from typing import Any

import torch


class StepClock:
    """Marks at the start and end of steps, whose times are read after all steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Mark the start of the first step or the end of a step."""
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def step_times_ms(self) -> list[float]:
        """Return the milliseconds between consecutive marks; waits for the device."""
        synchronise(self.device)
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self.device.type == "cuda":
            return [float(start.elapsed_time(end)) for start, end in pairs]
        return [(end - start) * 1e3 for start, end in pairs]


def synchronise(device: torch.device) -> None:
    """Wait for all work queued on a GPU; a CPU queues none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
