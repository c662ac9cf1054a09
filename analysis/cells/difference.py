"""Decides whether one cell is faster than another, by the same rule for all reports.

Identical cells in fresh processes differ by more than the steps within one process do. Therefore processes
are compared, with at least MIN_PROCESSES interleaved processes on each side. Predictions are compared at
equal rates of the hardware, replays by their ranges.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import product

import pandas as pd

from bench.common.statistics import MIN_PROCESSES, pair_rank, ratio_interval

LEVEL_SHARE = 0.05
"""Relative difference of speeds that counts as none where the interval excludes larger ones."""
MODEL_SHARE = 0.05
"""Relative difference of predicted speeds that counts as none. The model leaves out kernels that share a
device with copies, congestion, and ranks that wait, and no run on several GPUs has confirmed it."""
NO_LINK = "the time on the link is not known"
NOT_INTERLEAVED = "the runs were not interleaved"


@dataclass(frozen=True, slots=True)
class Processes:
    """Fresh processes of one cell that gave a speed."""

    tokens_per_s: tuple[float, ...]
    """Tokens/s of each process, from its median step."""
    started_at: tuple[str | None, ...]
    """Start times in UTC, so that they sort as text; None where not recorded."""

    def __len__(self) -> int:
        return len(self.tokens_per_s)


@dataclass(frozen=True, slots=True)
class SpeedDifference:
    """Ratio of two speeds with its interval, or the reason why it is undecided."""

    undecided: str | None
    """Reason in a few words; None where the ratio is decided."""
    ratio: float | None = None
    """Median ratio of all pairs of processes, of predictions and replays the ratio of the expected speeds.
    Above 1 the first side is faster. None where undecided."""
    low: float | None = None
    high: float | None = None
    """Upper end. `low` and `high` are a 95 % interval; of replays the bounds that both ranges allow, of
    predictions the bounds at equal rates of the hardware, widened by MODEL_SHARE."""

    @property
    def is_faster(self) -> bool:
        return self.low is not None and self.low > 1

    @property
    def is_level(self) -> bool:
        """Whether the speeds certainly differ by less than LEVEL_SHARE."""
        if self.low is None or self.high is None:
            return False
        return self.low > 1 / (1 + LEVEL_SHARE) and self.high < 1 + LEVEL_SHARE

    @property
    def is_slower(self) -> bool:
        return self.high is not None and self.high < 1


@dataclass(frozen=True, slots=True)
class RateBand:
    """Bounds and expected value of a predicted or replayed speed, in tokens/s."""

    low: float
    expected: float
    high: float


def band_difference(one: RateBand, other: RateBand) -> SpeedDifference:
    """Return the replayed speed of `one` over that of `other`, with the bounds that both ranges allow."""
    return SpeedDifference(
        None, one.expected / other.expected, low=one.low / other.high, high=one.high / other.low
    )


def predicted_difference(one: RateBand, other: RateBand) -> SpeedDifference:
    """Return the predicted speed of `one` over that of `other`, at equal rates of the hardware.

    Low ends are compared with low ends and high ends with high ends, because two strategies on one machine
    share most of the uncertainty, such as the rate of matrix products. MODEL_SHARE is added on both sides.
    """
    ratios = [one.low / other.low, one.expected / other.expected, one.high / other.high]
    low, high = min(ratios) / (1 + MODEL_SHARE), max(ratios) * (1 + MODEL_SHARE)
    return SpeedDifference(None, one.expected / other.expected, low, high)


def processes_of(frame: pd.DataFrame) -> Processes:
    """Return the processes of a frame that has a row for each, with `tokens_per_s` and `started_at`."""
    starts = (start if isinstance(start, str) else None for start in frame["started_at"])
    return Processes(tuple(frame["tokens_per_s"]), tuple(starts))


def speed_difference(one: Processes, other: Processes) -> SpeedDifference:
    """Return the speed of `one` over that of `other`, or why it is undecided.

    Ratio and interval are those of Hodges and Lehmann, with the exact test of Mann and Whitney. Processes ran
    in random order, so the error rate of the test is 5 % for every distribution. The same test on the start
    times says whether the processes of both sides were interleaved: where it finds a difference, a slow
    change of the machine may explain the difference in speed.
    """
    if min(len(one), len(other)) < MIN_PROCESSES:
        return SpeedDifference(too_few_processes({len(one), len(other)}))
    if not _are_interleaved(one, other):
        return SpeedDifference(NOT_INTERLEAVED)
    ratio, interval = ratio_interval(one.tokens_per_s, other.tokens_per_s)
    assert interval is not None
    return SpeedDifference(None, ratio, interval.low, interval.high)


def too_few_processes(counts: Collection[int]) -> str:
    """Return `one process each`, `3 processes each` or `1 to 6 processes each`."""
    low, high = min(counts), max(counts)
    if low == high:
        return "one process each" if low == 1 else f"{low} processes each"
    return f"{low} to {high} processes each"


def _are_interleaved(one: Processes, other: Processes) -> bool:
    """Return whether the processes of both sides were interleaved; False where a start time is unknown.

    They were, if the test of Mann and Whitney finds no difference between the start times of both sides.
    """
    starts = [[start for start in side.started_at if start is not None] for side in (one, other)]
    pairs = [*product(*starts)]
    if len(pairs) < len(one) * len(other):
        return False
    earlier = sum((start < other_start) + (start == other_start) / 2 for start, other_start in pairs)
    return min(earlier, len(pairs) - earlier) >= pair_rank(len(one), len(other))
