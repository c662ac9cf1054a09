"""What a rank is doing and has done: the pass it is in, the part of the step, and seconds per pass.

It tells before steps, never between them. Timed steps run back to back: on a GPU a step is launched long
before it is done, so that only waiting for it, which would change what is timed, could tell that it is.
Whoever listens counts steps by the clock and says "about".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


class WrongResultError(RuntimeError):
    """Raised on every rank when a check made before timing fails; its text names the first divergence."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A pass or, with `part`, something within it; `steps` full-length steps, or something else with 0.

    `step_s` is what a full-length step took, in seconds; None where none has been timed yet.
    """

    pass_name: str
    part: str | None = None
    steps: int = 0
    step_s: float | None = None


class StepPhase:
    """`name` is the part of the step that runs now, None outside of any.

    `on_change` is called with the part that ends, before another begins; it must not fail.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.on_change: Callable[[str | None], None] | None = None

    def enter(self, name: str | None) -> None:
        """One part ends and the next begins; costs an attribute."""
        if self.on_change is not None:
            self.on_change(self.name)
        self.name = name


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
