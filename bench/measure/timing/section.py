"""Timing section of a record: step times of all ranks. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from bench.common.rules import Name, PositiveInt, Times, check_lengths
from bench.common.statistics import slowest_median
from bench.config import USER_CODE, Cell, MeasureConfig
from bench.cost.flops import (
    CausalPairs,
    attention_backward_flops,
    attention_forward_flops,
    hardware_flops,
)
from bench.measure.check import Check
from bench.measure.facts import NOT_RUN, PassFacts, RankReport, join_by_rank
from bench.ranks.log import RankStage

FIRST_STEP, WARM_UP = "first step", "warm-up"
"""Names of parts of the pass in its reports: the first full-length step, which is the timed step if the
budget has no time for another, and the warm-up steps after it. The timed steps have no part name."""

FIRST_STEP_TOKENS = 2048
"""Largest length of the short first step."""
FASTEST_STEP = 1.5
"""Largest FLOP/s of a step, as a multiple of those of the fastest matrix product."""
MAX_WARM_UP_STEPS = 100
"""Largest number of full-length warm-up steps that `measure.warmup_s` may ask for.

It is limited because every step trains, and its loss is compared with that of the same step in other cells.
"""


class RankTiming(Struct, frozen=True, kw_only=True):
    """Timed steps of one rank, back to back after one barrier. Lists by rank have one entry."""

    step_times_ms: Annotated[list[Times], Meta(min_length=1)]
    """Milliseconds of every timed step, by rank and step."""
    window_ms: Times
    """Milliseconds by rank from the start of the first timed step to the end of the last."""
    warmup: Name
    """`full` if full-length steps ran before the timed ones; `short` if the budget left time for the short
    first step only, which happens on a CPU."""
    product_flops_per_s: list[float] | None = None
    """FLOP/s of the fastest plain matrix product, by rank; null if it was not measured."""

    def __post_init__(self) -> None:
        check_lengths("Expected equally many step_times_ms for each rank", *self.step_times_ms)


class TimingSection(RankTiming, frozen=True, kw_only=True):
    """Timed steps of all ranks."""

    tokens_per_step: PositiveInt


class TimingFacts(PassFacts[RankTiming, TimingSection]):
    name = "timing"
    part_type = RankTiming

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
        per_rank = join_by_rank(parts, "step_times_ms", "window_ms", "product_flops_per_s")
        return TimingSection(**per_rank, warmup=parts[0].warmup, tokens_per_step=cell.tokens_per_step)

    def gate(self, cell: Cell, section: TimingSection) -> str | None:
        """Return a message if a step has more FLOP/s than the device can have; None if not, or not known.

        A user's own loop may train a part of its model only, which takes fewer FLOPs.
        """
        products = section.product_flops_per_s
        if not products or cell.trainer == USER_CODE:
            return None
        step_s = slowest_median(section.step_times_ms) / 1e3
        reached, possible = least_flops(cell) / cell.cluster.world_size / step_s, max(products)
        if reached <= FASTEST_STEP * possible:
            return None
        return (
            f"timing: faster than the device: the median step has {reached / 1e9:,.0f} GFLOP/s per rank, the"
            f" fastest matrix product here {possible / 1e9:,.0f}; the step's work is not within its time"
        )

    def checks(self, cell: Cell, section: TimingSection | None) -> list[Check]:
        """Return the check that timed steps are no faster than the device; none for a user's own loop."""
        if cell.trainer == USER_CODE:
            return []
        check = Check(what="speed of timed steps", against="the fastest matrix product")
        if section is None or not section.product_flops_per_s:
            return [replace(check, reason=NOT_RUN)]
        steps = len(section.step_times_ms[0])
        return [replace(check, tokens=cell.seq_len, steps=steps, of_steps=steps)]


def least_flops(cell: Cell) -> int:
    """Return the FLOPs of a step on all ranks; those of attention do not count if documents are packed."""
    if not cell.workload.trains:
        causal = cell.workload.mask == "causal"
        return attention_forward_flops(cell, causal=causal) + attention_backward_flops(cell, causal=causal)
    return hardware_flops(cell, causal=True, pairs=CausalPairs(0, 0) if cell.data.packs else None)


def affordable_steps(measure: MeasureConfig, step_s: float) -> int:
    """Return the number of timed steps that fit the budget, between `min_timed_steps` and `steps`.

    Return 0 if the first full-length step has to be the timed step.
    """
    fits = int(measure.budget_s / step_s) if _has_room(measure, step_s) else 0
    return min(max(fits, measure.min_timed_steps), measure.steps)


def warm_up_steps(measure: MeasureConfig, step_s: float, done_s: Sequence[float]) -> int:
    """Return the number of full-length warm-up steps that are still to run.

    At least `measure.warmup_steps` run in total, if the budget has time for them. More run until their total
    time is `measure.warmup_s` seconds, up to MAX_WARM_UP_STEPS.

    Args:
        measure: Settings of the measurement.
        step_s: Seconds of one full-length step.
        done_s: Seconds of every full-length step that has run.
    """
    by_count = measure.warmup_steps if _has_room(measure, step_s) else 0
    by_time = math.ceil(max(0.0, measure.warmup_s - sum(done_s)) / step_s)
    return max(0, by_count - len(done_s), min(by_time, MAX_WARM_UP_STEPS - len(done_s)))


def _has_room(measure: MeasureConfig, step_s: float) -> bool:
    """Return whether the budget has time for a timed step in addition to `measure.warmup_steps`."""
    return int(measure.budget_s / step_s) > measure.warmup_steps + 1


def first_step_tokens(seq_len: int, multiple: int) -> int:
    """Return the tokens of the short first step: the largest multiple up to 2,048, or one larger multiple.

    Args:
        seq_len: Length of a full-length step, which the short step does not exceed.
        multiple: Number that must divide the tokens, for the layout.
    """
    return min(seq_len, max(multiple, FIRST_STEP_TOKENS // multiple * multiple))


FACTS = TimingFacts()
