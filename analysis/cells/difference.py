"""Whether one cell may be called faster than another: the one rule, wherever it is asked.

Identical cells in fresh processes differ by more than the steps within one process do, so only processes are
compared: MIN_PROCESSES on each side, run in turns. Predictions are compared at equal rates, replays by their
ranges.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product

import pandas as pd

from bench.common.statistics import MIN_PROCESSES, pair_rank, ratio_interval

LEVEL_SHARE = 0.05
"""Differences smaller than this are called none where an interval excludes larger ones."""
MODEL_SHARE = 0.05
"""Predicted differences smaller than this are called none: the model leaves out kernels that share a device
with copies, congestion and ranks that wait, and no run on several GPUs has confirmed it."""
NO_LINK = "the time on the link is not known"
NOT_IN_TURNS = "run one after the other, not in turns"


@dataclass(frozen=True, slots=True)
class Processes:
    """The fresh processes of one cell that gave a speed."""

    tokens_per_s: tuple[float, ...]
    """Each process's own, from its median step."""
    started_at: tuple[str | None, ...]
    """In UTC, so that texts sort as times do."""

    def __len__(self) -> int:
        return len(self.tokens_per_s)


@dataclass(frozen=True, slots=True)
class SpeedDifference:
    """One side's speed over another's, as far as it may be told."""

    undecided: str | None
    """Why nothing may be said, in a few words; None where something may."""
    ratio: float | None = None
    """The median ratio of all pairs of processes; above 1 the one side is faster. None where undecided.
    Of predictions and replays that of the expected speeds."""
    low: float | None = None
    high: float | None = None
    """The ratio's 95 % interval; of replays what both ranges leave possible, of predictions what equal rates
    and MODEL_SHARE do."""

    @property
    def is_faster(self) -> bool:
        return self.low is not None and self.low > 1

    @property
    def is_level(self) -> bool:
        """Whether the two differ by less than LEVEL_SHARE, whichever is faster."""
        if self.low is None or self.high is None:
            return False
        return self.low > 1 / (1 + LEVEL_SHARE) and self.high < 1 + LEVEL_SHARE

    @property
    def is_slower(self) -> bool:
        return self.high is not None and self.high < 1


@dataclass(frozen=True, slots=True)
class RateBand:
    """A predicted or replayed speed, in tokens/s."""

    low: float
    expected: float
    high: float


def band_difference(one: RateBand, other: RateBand) -> SpeedDifference:
    """Return the replayed speed of `one` over that of `other`: apart where their ranges do not meet."""
    return SpeedDifference(
        None, one.expected / other.expected, low=one.low / other.high, high=one.high / other.low
    )


def predicted_difference(one: RateBand, other: RateBand) -> SpeedDifference:
    """Return the predicted speed of `one` over that of `other`, at equal rates of the hardware.

    Low ends are compared with low ends and high ones with high ones: two strategies on one machine share
    most of what their bands hold, such as the rate of matrix products. MODEL_SHARE is added on both sides.
    """
    ends = ((one.low, other.low), (one.expected, other.expected), (one.high, other.high))
    ratios = [mine / theirs for mine, theirs in ends]
    low, high = min(ratios) / (1 + MODEL_SHARE), max(ratios) * (1 + MODEL_SHARE)
    return SpeedDifference(None, one.expected / other.expected, low, high)


def processes_of(frame: pd.DataFrame) -> Processes:
    """Those of which a frame has a row each, with `tokens_per_s` and `started_at`."""
    starts = (start if isinstance(start, str) else None for start in frame["started_at"])
    return Processes(tuple(frame["tokens_per_s"]), tuple(starts))


def difference(one: Processes, other: Processes) -> SpeedDifference:
    """The speed of `one` over that of `other`, or why it is undecided.

    Ratio and interval are those of Hodges and Lehmann with the exact test of Mann and Whitney. The order in
    which processes ran is random, so the test holds its 5 % whatever the distribution is. The same test,
    asked of the times at which they started, says whether the sides took turns: where it tells them apart, a
    machine that slowly changes may do so too.
    """
    if min(len(one), len(other)) < MIN_PROCESSES:
        return SpeedDifference(too_few({len(one), len(other)}))
    if not _took_turns(one, other):
        return SpeedDifference(NOT_IN_TURNS)
    ratio, interval = ratio_interval(one.tokens_per_s, other.tokens_per_s)
    assert interval is not None
    return SpeedDifference(None, ratio, interval.low, interval.high)


def too_few(counts: Collection[int]) -> str:
    """`one process each`, `3 processes each`, `1 to 6 processes each`."""
    low, high = min(counts), max(counts)
    if low == high:
        return "one process each" if low == 1 else f"{low} processes each"
    return f"{low} to {high} processes each"


def _took_turns(one: Processes, other: Processes) -> bool:
    """False, too, where it is not known when they ran."""
    known = [[start for start in side.started_at if start is not None] for side in (one, other)]
    pairs = [*product(*known)]
    if len(pairs) < len(one) * len(other):
        return False
    earlier = sum((mine < theirs) + (mine == theirs) / 2 for mine, theirs in pairs)
    return min(earlier, len(pairs) - earlier) >= pair_rank(len(one), len(other))
