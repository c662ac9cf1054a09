"""How long steps took: the timed pass without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.config import MeasureConfig, RunConfig
from bench.passes.facts import PassFacts, RankReport, by_rank
from bench.ranks.log import Stage

FIRST_STEP, WARM_UP = "first step", "warm-up"
"""Parts of the pass: the first full-length step, which is the timed one where the budget has room for no
other, and the warm-up steps after it. The timed steps are no part by name."""

FIRST_STEP_TOKENS = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTiming:
    """One rank's timed steps."""

    step_times_ms: list[float]
    window_ms: float
    warmup: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Steps back to back after one barrier."""

    step_times_ms: list[list[float]]
    """By rank and step."""
    window_ms: list[float]
    """By rank, the whole timed window."""
    warmup: str
    """`full` when full-length steps ran before the clock, `short` when the budget left room for shorter ones
    only."""
    tokens_per_step: int


class TimingFacts(PassFacts[RankTiming, Timing]):
    name = "timing"
    part = RankTiming

    def stages(self, measure: MeasureConfig, step_s: float) -> list[Stage]:
        if measure.budget_s == 0:
            return [Stage("timing", WARM_UP, measure.warmup_steps), Stage("timing", steps=measure.steps)]
        affordable = affordable_steps(measure, step_s)
        if affordable == 0:
            return [Stage("timing", FIRST_STEP, 1)]
        return [
            Stage("timing", FIRST_STEP, 1),
            Stage("timing", WARM_UP, max(0, measure.warmup_steps - 1)),
            Stage("timing", steps=affordable),
        ]

    def merge(self, reports: Sequence[RankReport], cell: RunConfig) -> Timing:
        parts = self.parts(reports)
        return Timing(
            step_times_ms=by_rank(parts, "step_times_ms"),
            window_ms=by_rank(parts, "window_ms"),
            warmup=parts[0].warmup,
            tokens_per_step=cell.tokens_per_step,
        )


def affordable_steps(measure: MeasureConfig, step_s: float) -> int:
    """Timed steps that fit the budget after the warm-up; 0 where the first step has to do."""
    fits = int(measure.budget_s / step_s)
    return min(fits, measure.steps) if fits > measure.warmup_steps + 1 else 0


def first_step_tokens(seq_len: int, multiple: int) -> int:
    """Tokens of the step that pays for all that happens once: at most 2,048 that the layout divides."""
    return min(seq_len, max(multiple, FIRST_STEP_TOKENS // multiple * multiple))


FACTS = TimingFacts()
