"""How long steps took: the timed pass without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from bench.common.rules import Count, Name, Times, check_lengths
from bench.config import Cell, MeasureConfig
from bench.measure.facts import PassFacts, RankReport, together
from bench.ranks.log import RankStage

FIRST_STEP, WARM_UP = "first step", "warm-up"
"""Parts of the pass: the first full-length step, which is the timed one where the budget has room for no
other, and the warm-up steps after it. The timed steps are no part by name."""

FIRST_STEP_TOKENS = 2048
MAX_WARM_UP_STEPS = 100
"""How many full-length steps `measure.warmup_s` may lead to: each trains, and is compared with others."""


class RankTiming(Struct, frozen=True, kw_only=True):
    """Steps of one rank, back to back after one barrier; its lists by rank have one entry."""

    step_times_ms: Annotated[list[Times], Meta(min_length=1)]
    """By rank and step."""
    window_ms: Times
    """By rank, the whole timed window."""
    warmup: Name
    """`full` when full-length steps ran before the clock, `short` when the budget left room for shorter ones
    only, as it may on a CPU."""

    def __post_init__(self) -> None:
        check_lengths("Expected equally many step_times_ms for each rank", *self.step_times_ms)


class TimingSection(RankTiming, frozen=True, kw_only=True):
    """Steps of all ranks."""

    tokens_per_step: Count
    """Tokens of all ranks together."""


class TimingFacts(PassFacts[RankTiming, TimingSection]):
    name = "timing"
    part = RankTiming

    def stages(self, measure: MeasureConfig, step_s: float) -> list[RankStage]:
        if measure.budget_s == 0:
            return [
                RankStage("timing", WARM_UP, measure.warmup_steps),
                RankStage("timing", steps=measure.steps),
            ]
        affordable = affordable_steps(measure, step_s)
        if affordable == 0:
            return [RankStage("timing", FIRST_STEP, 1)]
        return [
            RankStage("timing", FIRST_STEP, 1),
            RankStage("timing", WARM_UP, warm_up_steps(measure, step_s, [step_s])),
            RankStage("timing", steps=affordable),
        ]

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> TimingSection:
        parts = self.parts(reports)
        of_all = together(parts, "step_times_ms", "window_ms")
        return TimingSection(**of_all, warmup=parts[0].warmup, tokens_per_step=cell.tokens_per_step)


def affordable_steps(measure: MeasureConfig, step_s: float) -> int:
    """Timed steps that fit the budget after the warm-up; 0 where the first step has to do."""
    fits = int(measure.budget_s / step_s) if _has_room(measure, step_s) else 0
    return min(max(fits, measure.min_timed_steps), measure.steps)


def warm_up_steps(measure: MeasureConfig, step_s: float, done_s: Sequence[float]) -> int:
    """Full-length steps still to come before the clock, after those that took `done_s` seconds each.

    As many as asked for, where the budget has room for them, and enough for `measure.warmup_s` to pass.
    """
    asked = measure.warmup_steps if _has_room(measure, step_s) else 0
    by_time = math.ceil(max(0.0, measure.warmup_s - sum(done_s)) / step_s)
    return max(0, asked - len(done_s), min(by_time, MAX_WARM_UP_STEPS - len(done_s)))


def _has_room(measure: MeasureConfig, step_s: float) -> bool:
    """Whether the budget holds a timed step beside the warm-up that was asked for."""
    return int(measure.budget_s / step_s) > measure.warmup_steps + 1


def first_step_tokens(seq_len: int, multiple: int) -> int:
    """Tokens of the step that pays for all that happens once: at most 2,048 that the layout divides."""
    return min(seq_len, max(multiple, FIRST_STEP_TOKENS // multiple * multiple))


FACTS = TimingFacts()
