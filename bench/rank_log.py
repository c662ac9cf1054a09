"""What a rank is doing and has done: the phase it is in, and seconds per phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from bench.stage import Stage
from bench.step_phase import StepPhase

STEP_PHASES = ("parity", "gradients", "timing", "engagement", "trace", "attention")
"""Phases that are a cell's own work: all the rest is its fixed cost."""


@dataclass(slots=True)
class RankLog:
    """Where a rank is, how many seconds each phase took, and whom to tell.

    `step` says where in a step it is. `on_error` hears of an error where it leaves a phase, before any
    cleanup further out: that may take long, or fail in a way of its own and hide the cause.
    `limit_base_bytes` is what a memory limit counts from; None without one.
    """

    tell: Callable[[Stage], None]
    phase: str = "start"
    phases_s: dict[str, float] = field(default_factory=dict)
    step: StepPhase = field(default_factory=StepPhase)
    on_error: Callable[[BaseException], None] = lambda _: None
    limit_base_bytes: int | None = None

    @contextmanager
    def during(self, phase: str, steps: int = 0, step_s: float | None = None) -> Iterator[None]:
        """Name the phase for messages; a phase that raises stays the current one.

        `steps` it is about to run at full length, of `step_s` seconds each: whoever listens counts by that.
        """
        self.phase = phase
        self.step.enter(None)
        self.tell(Stage(phase, steps=steps, step_s=step_s))
        start = time.monotonic()
        try:
            yield
        except BaseException as error:
            self.on_error(error)
            raise
        self.phases_s[phase] = time.monotonic() - start
