"""A median and how sure it is, without assuming any distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A 95 % nonparametric interval of the median, in the unit of its samples."""

    low: float
    high: float


@cache
def interval_rank(n: int) -> int:
    """The k for which [k-th smallest, k-th largest] of n samples covers the median with at least 95 %.

    0 where n is too small for any: [min, max] covers it with probability 1 - 2 (1/2)^n, 93.75 % at 5 and
    96.9 % at 6.
    """
    tail, k = 0.0, 0
    while k < n:
        tail += math.comb(n, k) / 2**n
        if 2 * tail > 0.05:  # noqa: PLR2004  100 % less the interval's 95 %
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
