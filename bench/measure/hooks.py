"""Hooks on models and optimizers that are not ours, and when an optimizer was at work in a step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bench.common.kept_errors import KeptErrors
from bench.ranks.log import StepPhase


@dataclass(frozen=True, slots=True)
class Hook:
    """A hook that copies of the model do not have: a loop may copy or pickle its model within a step.

    A bound method would take the loop's wrapped model and its process groups into the copy.
    """

    run: Callable[..., None]

    def __call__(self, *given: Any) -> None:
        self.run(*given)

    def __reduce__(self) -> tuple[Any, ...]:
        """Something that does nothing, and that is unpickled where there is no bench."""
        return getattr, (nullcontext(), "__exit__")


Spans = list[tuple[int, int]]
"""When something was entered and left, in `time.monotonic_ns`."""


@contextmanager
def method_spans(owner: object | None, method: str) -> Iterator[Spans]:
    """Calls of an object's method while the context lasts; none where there is no object."""
    spans_ns: Spans = []
    if owner is None:
        yield spans_ns
        return
    run = getattr(owner, method)

    def stamped() -> Any:
        start_ns = time.monotonic_ns()
        result = run()
        spans_ns.append((start_ns, time.monotonic_ns()))
        return result

    setattr(owner, method, stamped)
    try:
        yield spans_ns
    finally:
        delattr(owner, method)


@contextmanager
def step_spans(phase: StepPhase) -> Iterator[Spans]:
    """Steps of every torch optimizer while the context lasts; `phase` hears of them, too."""
    spans_ns: Spans = []
    entered_ns: list[int] = []

    errors = KeptErrors()

    def enter(*_: object) -> None:
        with errors:
            phase.enter("optimizer")
            entered_ns.append(time.monotonic_ns())

    def leave(*_: object) -> None:
        with errors:
            spans_ns.append((entered_ns.pop(), time.monotonic_ns()))
            phase.enter(None)

    hooks = register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)
    try:
        yield spans_ns
    finally:
        for hook in hooks:
            hook.remove()
    errors.raise_first()
