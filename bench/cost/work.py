"""What a step computes and sends, at whatever speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from bench.config import RunConfig
from bench.cost.operations import Operation, micro_step, step_end
from bench.cost.traffic import Messages, messages
from bench.strategies import STRATEGIES
from bench.strategies.schedule import Stage, Stages

Counted = Mapping[Stage, int]
"""Different stages, and how often each comes: most of a long ring are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWork:
    """Of the rank with most to do."""

    forward: Counted
    """Of one call of attention."""
    backward: Counted
    micro_step: tuple[Operation, ...]
    """All but attention."""
    update: tuple[Operation, ...]
    messages: tuple[Messages, ...]
    """All of the step but attention's."""


@lru_cache(maxsize=16)
def step_work(cell: RunConfig) -> StepWork | None:
    """The work of one optimizer step of a cell that trains; None where a strategy has no formula.

    Kept, as a prediction prices it once at every end of what is not known.
    """
    facts = STRATEGIES.get(cell.strategy)
    schedule = None if facts is None else facts.schedule(cell)
    if schedule is None:
        return None
    return StepWork(
        forward=counted(schedule.forward),
        backward=counted(schedule.backward),
        micro_step=tuple(micro_step(cell)),
        update=tuple(step_end(cell)),
        messages=messages(cell),
    )


def counted(stages: Stages) -> Counted:
    """Equal stages together, in the order of the first of each."""
    return Counter(stages)
