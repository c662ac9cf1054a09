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
from bench.measure.clock import StepClock, synchronise
from bench.training.trainers import StepOutcome, Trainer

SHORT_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class TimedSteps:
    """One rank's timed pass; `outcomes` are those of all full-length steps, `first` their first step."""

    step_times_ms: list[float]
    window_ms: float
    warmup: str
    outcomes: list[StepOutcome]
    next_step: int


def time_steps(
    trainer: Trainer,
    cell: RunConfig,
    device: torch.device,
    tell: Callable[[str], None],
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> TimedSteps:
    """Time as many steps as `measure.steps` and `measure.budget_s` allow, at least one.

    A short step has paid for lazy initialisation by now. Where the budget leaves no room for full-length
    warm-up steps, the first full-length step is the timed one and the warm-up is called short. `around` is
    entered before each window's clock starts and left after it stops; the last window is the timed one.
    """
    tell("warm-up")
    first = _window(trainer, range(1), cell, device, around)
    rounds = _affordable(first.window_ms, cell, device)
    if rounds == 0:
        return first
    for number in range(1, cell.measure.warmup_steps):
        first.outcomes.append(trainer.step(number, cell.seq_len))
    tell(f"timing {rounds} steps")
    start = max(cell.measure.warmup_steps, 1)
    timed = _window(trainer, range(start, start + rounds), cell, device, around)
    return TimedSteps(
        timed.step_times_ms,
        timed.window_ms,
        "full",
        first.outcomes + timed.outcomes,
        timed.next_step,
    )


def short_step(trainer: Trainer, cell: RunConfig, length_multiple: int) -> None:
    """One step of at most 2,048 tokens, for all that happens only once: allocators, optimizer state."""
    short = SHORT_TOKENS // length_multiple * length_multiple
    trainer.step(0, min(cell.seq_len, max(short, length_multiple)))


def _window(
    trainer: Trainer,
    steps: range,
    cell: RunConfig,
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
            outcomes.append(trainer.step(number, cell.seq_len))
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
