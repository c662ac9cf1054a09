"""The timed pass: warm up, agree on a number of steps, run them back to back after one barrier."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from bench.config import RunConfig
from bench.passes.timing.clock import StepClock, synchronise
from bench.ranks.log import FIRST_STEP, WARM_UP, Stage


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """One rank's timed pass; `outcomes` are what all full-length steps returned, the timed ones last."""

    step_times_ms: list[float]
    window_ms: float
    warmup: str
    outcomes: list[Any]
    next_step: int


def time_steps(
    run_step: Callable[[int], Any],
    cell: RunConfig,
    device: torch.device,
    tell: Callable[[Stage], None],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> TimedSteps:
    """Time as many steps as `measure.steps` and `measure.budget_s` allow, at least one.

    A short step has paid for lazy initialisation by now. Where the budget leaves no room for full-length
    warm-up steps, the first full-length step is the timed one and the warm-up is called short. `around` is
    entered before each window's clock starts and left after it stops; the last window is the timed one.
    `tell` hears what comes before it begins, and nothing while a window lasts.
    """
    tell(Stage("timing", FIRST_STEP, 1))
    first = _window(run_step, range(1), device, around)
    rounds = _affordable(first.window_ms, cell, device)
    if rounds == 0:
        return first
    step_s = first.window_ms / 1e3
    if cell.measure.warmup_steps > 1:
        tell(Stage("timing", WARM_UP, cell.measure.warmup_steps - 1, step_s))
    for number in range(1, cell.measure.warmup_steps):
        first.outcomes.append(run_step(number))
    tell(Stage("timing", None, rounds, step_s))
    start = max(cell.measure.warmup_steps, 1)
    timed = _window(run_step, range(start, start + rounds), device, around)
    return TimedSteps(
        timed.step_times_ms,
        timed.window_ms,
        "full",
        first.outcomes + timed.outcomes,
        timed.next_step,
    )


def _window(
    run_step: Callable[[int], Any],
    steps: range,
    device: torch.device,
    around: Callable[[], AbstractContextManager[Any]],
) -> TimedSteps:
    with around():
        dist.barrier()
        synchronise(device)
        clock = StepClock(device)
        start = time.perf_counter()
        clock.mark()
        outcomes = []
        for number in steps:
            outcomes.append(run_step(number))
            clock.mark()
        step_times_ms = clock.step_times_ms()
        window_ms = (time.perf_counter() - start) * 1e3
    return TimedSteps(step_times_ms, window_ms, "short", outcomes, steps.stop)


def _affordable(first_ms: float, cell: RunConfig, device: torch.device) -> int:
    """Timed steps that fit the budget after warm-up; 0 when the first step has to do. Rank 0 decides."""
    fits = int(cell.measure.budget_s * 1e3 / first_ms)
    enough = fits > cell.measure.warmup_steps + 1
    decision = torch.tensor(min(fits, cell.measure.steps) if enough else 0, device=device)
    dist.broadcast(decision, src=0)
    return int(decision.item())
