"""What the clock showed of one rank's steps."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """One rank's timed window, and what steps returned."""

    step_times_ms: list[float]
    window_ms: float
    warmup: str
    outcomes: list[Any]
    """What all full-length steps returned, the timed ones last."""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.step_times_ms)
