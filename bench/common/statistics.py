"""A median, a ratio or a share, and how sure it is, without assuming any distribution of samples."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

MIN_PROCESSES = 6
"""Of each side of a comparison: as many samples as an interval of a median takes."""
MAX_PROCESSES = 20
"""Of each side, whatever they spread by, where their number is left open."""
SPARE = 1.1
"""Factor on the seconds that further processes should take, for those that take longer than before."""
TOLD_RATIO = 1.10
"""How far apart two speeds are that enough processes tell apart."""
POWER = 0.8
"""How often they do."""
ERROR_SHARE = 1 - 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A 95 % interval, of a median in the unit of its samples."""

    low: float
    high: float


def slowest(by_rank: Sequence[Sequence[float]]) -> list[float]:
    """Return what the slowest rank took, step by step or call by call."""
    return [*map(max, zip(*by_rank, strict=True))]


def slowest_median(by_rank: Sequence[Sequence[float]]) -> float:
    """The median over steps or calls of what the slowest rank took, in the unit of the samples."""
    return float(statistics.median(slowest(by_rank)))


@cache
def interval_rank(n: int) -> int:
    """The k for which [k-th smallest, k-th largest] of n samples covers the median with at least 95 %.

    0 where n is too small for any: [min, max] covers it with probability 1 - 2 (1/2)^n, 93.75 % at 5 and
    96.9 % at 6.
    """
    tail, k = 0.0, 0
    while k < n:
        tail += math.comb(n, k) / 2**n
        if 2 * tail > ERROR_SHARE:
            break
        k += 1
    return k


def median_interval(samples: Sequence[float]) -> Interval | None:
    """The 95 % interval of the median by order statistics; None below six samples."""
    k = interval_rank(len(samples))
    if k == 0:
        return None
    ordered = sorted(samples)
    return Interval(low=ordered[k - 1], high=ordered[-k])


@cache
def pair_rank(n: int, m: int) -> int:
    """The k for which [k-th smallest, k-th largest] of the n * m ratios of pairs covers the true ratio.

    With at least 95 %; 0 where n and m are too small for that. Two samples of six have k = 6, and 95.9 %.

    Of samples that differ by a factor only, the number of pairs in which the first side is the larger is
    distributed as Mann and Whitney's U (1947), whatever the samples' own distribution is.
    """
    from scipy.stats import mannwhitneyu  # takes a second

    u = np.arange(n * m // 2 + 1)[:, None]
    ones = np.clip(u - m * np.arange(n), 0, m) - 0.5  # larger than one of range(m) in u pairs
    chances = mannwhitneyu(ones, np.arange(m)[None, :], method="exact", axis=1).pvalue
    return int((chances <= ERROR_SHARE).sum())


def ratio_interval(ones: Sequence[float], others: Sequence[float]) -> tuple[float, Interval | None]:
    """By what factor `ones` are larger than `others`, both positive, and the factor's 95 % interval.

    The factor is the median ratio of all pairs, one of each side (J. L. Hodges and E. L. Lehmann, Estimates
    of location based on rank tests, 1963, on logarithms); the interval inverts the exact test of Mann and
    Whitney. It leaves out 1 exactly where that test says at 5 % that the sides differ. None below the samples
    that it takes: four on each side, or three and five.
    """
    ratios = sorted(math.log(one / other) for one in ones for other in others)
    k = pair_rank(len(ones), len(others))
    interval = Interval(low=math.exp(ratios[k - 1]), high=math.exp(ratios[-k])) if k else None
    return math.exp(statistics.median(ratios)), interval


def pooled_spread(sides: Iterable[Sequence[float]]) -> float:
    """The standard deviation of the logarithm of positive samples about the mean of their own side."""
    logs = [[math.log(each) for each in side] for side in sides]
    squares = sum((len(side) - 1) * statistics.variance(side) for side in logs)
    return math.sqrt(squares / sum(len(side) - 1 for side in logs))


def enough_processes(spread: float) -> int:
    """How many processes of each side tell speeds apart that differ by TOLD_RATIO, in POWER of all cases.

    `spread` is that of `pooled_spread`. The number is Noether's for the test of Mann and Whitney (G. E.
    Noether, Sample size determination for some common nonparametric tests, 1987), for logarithms that are
    normal. It looks at the spread and never at the difference, so the test keeps its 5 % (C. Stein, A
    two-sample test for a linear hypothesis whose power is independent of the variance, 1945).
    """
    normal = statistics.NormalDist()
    if spread == 0:
        return MIN_PROCESSES
    advantage = normal.cdf(math.log(TOLD_RATIO) / (spread * math.sqrt(2))) - 1 / 2
    deviations = normal.inv_cdf(1 - ERROR_SHARE / 2) + normal.inv_cdf(POWER)
    return min(MAX_PROCESSES, max(MIN_PROCESSES, math.ceil((deviations / advantage) ** 2 / 6)))
