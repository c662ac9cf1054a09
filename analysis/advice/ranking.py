"""Options in order, and which differences may be told."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from analysis.advice.option import Option
from bench.cost.fit import Fit

RESOLUTION = 0.05
"""Predicted differences below this are not reported. The model leaves out what may differ by so much between
two strategies: kernels that share a GPU with copies, congestion, ranks that wait. No run on several GPUs has
confirmed it."""
NEAR = 0.01
"""Options so near to the fastest are as good as it: of them the one that needs least memory comes first."""
ORDER: Mapping[Fit | None, int] = {Fit.FITS: 0, None: 0, Fit.UNDECIDED: 1, Fit.OUT_OF_MEMORY: 2}


@dataclass(frozen=True, slots=True)
class Behind:
    """How much slower an option is than the first: shares of the first's tokens/s, below 0 where slower."""

    low: float
    high: float
    is_told: bool
    """Whether it may be called slower."""


@dataclass(frozen=True, slots=True)
class Ranking:
    """Options for one piece of work."""

    able: tuple[Option, ...]
    """Those that can run: those that fit by tokens/s of a rank, then those of which that is undecided.

    Of those NEAR the fastest the one that needs least memory comes before all.
    """
    too_large: tuple[Option, ...]
    """Legal, but without room, the smallest first."""
    refused: tuple[Option, ...]

    @property
    def first(self) -> Option | None:
        return self.able[0] if self.able else None

    @property
    def best(self) -> tuple[Option, ...]:
        """Of each strategy, with its layout and its own options, the first that can run; and what ran."""
        kept: dict[tuple[object, ...], Option] = {}
        for each in self.able:
            first = kept.setdefault((each.cell.strategy, each.cell.layout, each.cell.options), each)
            if each is not first and each.measured is not None:
                kept[(each.cell.cell_id,)] = each
        return tuple(kept.values())

    @property
    def fastest(self) -> Option | None:
        """By what is expected, of those whose memory is as sure as the first's."""
        as_sure = (each for each in self.able if ORDER[each.fit] == ORDER[self.able[0].fit])
        return max(as_sure, key=lambda each: each.tokens_per_s.expected, default=None)

    def level(self, lead: Option) -> tuple[Option, ...]:
        """Of `best` all that this one is not clearly ahead of, where their memory is as sure."""
        return tuple(
            each
            for each in self.best
            if ORDER[each.fit] == ORDER[lead.fit] and (each is lead or not behind(lead, each).is_told)
        )


def ranked(options: Iterable[Option]) -> Ranking:
    """These options in order."""
    known = [*options]
    legal = [each for each in known if each.refused is None]
    able = sorted(
        (each for each in legal if each.can_run),
        key=lambda each: (ORDER[each.fit], -each.tokens_per_s.expected),
    )
    too_large = [each for each in legal if not each.can_run]
    return Ranking(
        able=_least_of_the_fastest_first(able),
        too_large=tuple(sorted(too_large, key=_needed_bytes)),
        refused=tuple(each for each in known if each.refused is not None),
    )


def _least_of_the_fastest_first(able: Sequence[Option]) -> tuple[Option, ...]:
    near = [
        each
        for each in able
        if ORDER[each.fit] == ORDER[able[0].fit]
        and each.tokens_per_s.expected >= (1 - NEAR) * able[0].tokens_per_s.expected
    ]
    if not near:
        return ()
    least = min(near, key=_needed_bytes)
    return (least, *(each for each in able if each is not least))


def behind(first: Option, other: Option) -> Behind:
    """The other's speed against the first's.

    Two predictions are compared at the same rates, corner by corner of what is not known; two measurements
    by their processes. Between a prediction and a measurement nothing is told.
    """
    if first.measured is None and other.measured is None:
        ratios = [
            mine / theirs - 1 for mine, theirs in zip(other.corner_rates, first.corner_rates, strict=True)
        ]
        return Behind(min(ratios), max(ratios), max(ratios) < -RESOLUTION)
    mine, theirs = other.tokens_per_s, first.tokens_per_s
    told = _is_measured_slower(other, first)
    return Behind(mine.low / theirs.high - 1, mine.high / theirs.low - 1, told)


def _is_measured_slower(one: Option, other: Option) -> bool:
    """By the rule that holds for all measured cells."""
    if one.measured is None or other.measured is None:
        return False
    from analysis.cells.difference import Processes, difference  # pandas

    sides = (Processes(each.tokens_per_s, each.started_at) for each in (one.measured, other.measured))
    return difference(*sides).is_slower


def _needed_bytes(option: Option) -> float:
    return 0.0 if option.prediction is None else option.prediction.needed_bytes.expected
