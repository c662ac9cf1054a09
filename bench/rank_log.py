"""What a rank is doing and has done: the phase it is in, and seconds per phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

STEP_PHASES = ("parity", "gradients", "steps", "inspection", "trace")
"""Phases that are a cell's own work: all the rest is its fixed cost."""


@dataclass(slots=True)
class RankLog:
    """Where a rank is, how many seconds each phase took, and whom to tell."""

    tell: Callable[[str], None]
    phase: str = "start"
    phases_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name the phase for messages; a phase that raises stays the current one."""
        self.phase = phase
        self.tell(phase)
        start = time.monotonic()
        yield
        self.phases_s[phase] = time.monotonic() - start
