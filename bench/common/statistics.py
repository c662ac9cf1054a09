"""Medians, ratios and their 95 % intervals, without assumptions about the distribution of samples.

A comparison has two sides, for example two strategies. Each side has one sample for each process that ran it.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

MIN_PROCESSES = 6
"""Minimum number of processes on each side of a comparison. Fewer samples have no 95 % interval of the
median."""
MAX_PROCESSES = 20
"""Maximum number of processes on each side that `measure.repeats=auto` chooses, for any spread of samples."""
TIME_MARGIN = 1.1
"""Factor on the estimated seconds of further repeats, which may take longer than the earlier ones."""
DETECTABLE_RATIO = 1.10
"""Speed ratio that the planned number of processes must be able to detect."""
POWER = 0.8
"""Probability with which that number of processes must detect DETECTABLE_RATIO."""
SIGNIFICANCE_LEVEL = 1 - 0.95
"""Probability that an interval does not contain the true value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A 95 % interval, in the unit of the samples."""

    low: float
    high: float


def slowest_rank_times(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return the time of the slowest rank in each step or call.

    Args:
        by_rank: Times of the steps or calls of each rank.
    """
    return [*map(max, zip(*by_rank, strict=True))]


def slowest_median(by_rank: Sequence[Sequence[float]]) -> float:
    """Return the median over steps or calls of the slowest rank's time, in the unit of the samples."""
    return float(statistics.median(slowest_rank_times(by_rank)))


@cache
def interval_rank(n: int) -> int:
    """Return the largest k for which [k-th smallest, k-th largest] of n samples is a 95 % interval.

    The interval is that of the median. k is 0 if n is too small: [min, max] contains the median with
    probability 1 - 2 (1/2)^n, which is 93.75 % for 5 samples and 96.9 % for 6.
    """
    tail, k = 0.0, 0
    while k < n:
        tail += math.comb(n, k) / 2**n
        if 2 * tail > SIGNIFICANCE_LEVEL:
            break
        k += 1
    return k


def median_interval(samples: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of the median by order statistics; None for fewer than six samples."""
    k = interval_rank(len(samples))
    if k == 0:
        return None
    ordered = sorted(samples)
    return Interval(low=ordered[k - 1], high=ordered[-k])


@cache
def pair_rank(n: int, m: int) -> int:
    """Return the largest k for which [k-th smallest, k-th largest] of n * m pair ratios is a 95 % interval.

    The interval is that of the ratio of two sides with n and m samples. k is 0 if n and m are too small, and
    6 for two sides of six samples, which gives 95.9 %. If the sides differ by a factor only, the number of
    pairs in which the first side is larger is distributed as Mann and Whitney's U (1947), whatever the
    distribution of the samples.
    """
    from scipy.stats import mannwhitneyu  # takes a second

    u = np.arange(n * m // 2 + 1)[:, None]
    # For each u, a first side that is larger than the second side, range(m), in u pairs.
    first_side = np.clip(u - m * np.arange(n), 0, m) - 0.5
    p_values = mannwhitneyu(first_side, np.arange(m)[None, :], method="exact", axis=1).pvalue
    return int((p_values <= SIGNIFICANCE_LEVEL).sum())


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float]
) -> tuple[float, Interval | None]:
    """Return the ratio of two sides of positive samples, and its 95 % interval.

    The ratio is the median over all pairs with one sample of each side (J. L. Hodges and E. L. Lehmann,
    Estimates of location based on rank tests, 1963, on logarithms). The interval inverts the exact test of
    Mann and Whitney: it excludes 1 exactly if that test rejects equal sides at 5 %. It is None for fewer than
    four samples on each side, or three and five.
    """
    ratios = sorted(math.log(above / below) for above in numerators for below in denominators)
    k = pair_rank(len(numerators), len(denominators))
    interval = Interval(low=math.exp(ratios[k - 1]), high=math.exp(ratios[-k])) if k else None
    return math.exp(statistics.median(ratios)), interval


def pooled_spread(sides: Iterable[Sequence[float]]) -> float:
    """Return the pooled standard deviation of the logarithms of positive samples within their sides."""
    logs = [[math.log(sample) for sample in side] for side in sides]
    squares = sum((len(side) - 1) * statistics.variance(side) for side in logs)
    return math.sqrt(squares / sum(len(side) - 1 for side in logs))


def enough_processes(spread: float) -> int:
    """Return the number of processes on each side that detects a ratio of 1.1 with a probability of 0.8.

    The number is Noether's for the test of Mann and Whitney (G. E. Noether, Sample size determination for
    some common nonparametric tests, 1987), if logarithms are normally distributed. It depends on the spread
    and not on the measured difference, so that the test keeps its 5 % (C. Stein, A two-sample test for a
    linear hypothesis whose power is independent of the variance, 1945).

    Args:
        spread: Standard deviation of the logarithms of samples, as from `pooled_spread`.
    """
    normal = statistics.NormalDist()
    if spread == 0:
        return MIN_PROCESSES
    advantage = normal.cdf(math.log(DETECTABLE_RATIO) / (spread * math.sqrt(2))) - 1 / 2
    deviations = normal.inv_cdf(1 - SIGNIFICANCE_LEVEL / 2) + normal.inv_cdf(POWER)
    return min(MAX_PROCESSES, max(MIN_PROCESSES, math.ceil((deviations / advantage) ** 2 / 6)))
