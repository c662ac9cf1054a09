"""Hooks on models and optimizers, and the times at which an optimizer ran."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from bench.common.deferred_errors import DeferredErrors
from bench.ranks.log import StepPhase


@dataclass(frozen=True, slots=True)
class Hook:
    """Hook of a model that does nothing in a copy of the model.

    A training loop may copy or pickle its model in a step. If the hook were a bound method, copying the model
    would also copy the object it is bound to, and with it the wrapped model and its process groups.
    """

    run: Callable[..., None]

    def __call__(self, *args: Any) -> None:
        self.run(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a callable that does nothing and can be unpickled without `bench`."""
        return getattr, (nullcontext(), "__exit__")


Spans = list[tuple[int, int]]
"""Start and end of each call in nanoseconds, by `time.monotonic_ns`."""


@contextmanager
def method_spans(owner: object | None, method: str) -> Iterator[Spans]:
    """Yield a list that receives the span of each call of `owner.method`; it stays empty without an owner."""
    spans_ns: Spans = []
    if owner is None:
        yield spans_ns
        return
    run = getattr(owner, method)

    def run_and_record() -> Any:
        start_ns = time.monotonic_ns()
        result = run()
        spans_ns.append((start_ns, time.monotonic_ns()))
        return result

    setattr(owner, method, run_and_record)
    try:
        yield spans_ns
    finally:
        delattr(owner, method)


@contextmanager
def optimizer_step_spans(phase: StepPhase) -> Iterator[Spans]:
    """Yield a list that receives the span of each step of a torch optimizer; report each to `phase`."""
    spans_ns: Spans = []
    starts_ns: list[int] = []

    errors = DeferredErrors()

    def enter(*_: object) -> None:
        with errors:
            phase.enter("optimizer")
            starts_ns.append(time.monotonic_ns())

    def leave(*_: object) -> None:
        with errors:
            spans_ns.append((starts_ns.pop(), time.monotonic_ns()))
            phase.enter(None)

    hooks = register_optimizer_step_pre_hook(enter), register_optimizer_step_post_hook(leave)
    try:
        yield spans_ns
    finally:
        for hook in hooks:
            hook.remove()
    errors.raise_first()
