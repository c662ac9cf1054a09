"""How much faster one set of samples is than another, and how sure that is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.median import interval_rank

RESAMPLES = 4000
SEED = 0
"""The same samples always give the same interval."""
PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio of medians with its 95 % interval, which is missing where there are too few samples."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def is_above_one(self) -> bool:
        return self.low is not None and self.low > 1

    @property
    def is_below_one(self) -> bool:
        return self.high is not None and self.high < 1


def speed_ratio(before_ms: Sequence[float], after_ms: Sequence[float]) -> Ratio:
    """Median of the times before over that after: 2 where the same work takes half the time.

    The interval is a percentile bootstrap of that ratio (B. Efron, Bootstrap Methods, 1979), each side drawn
    by itself. It exists where both sides have the six samples that an interval of a median takes.
    """
    before, after = np.asarray(before_ms), np.asarray(after_ms)
    value = float(np.median(before) / np.median(after))
    if not (interval_rank(len(before)) and interval_rank(len(after))):
        return Ratio(value)
    random = np.random.default_rng(SEED)
    medians = (
        np.median(samples[random.integers(len(samples), size=(RESAMPLES, len(samples)))], axis=1)
        for samples in (before, after)
    )
    ratios = np.divide(*medians)
    low, high = np.percentile(ratios, PERCENTILES)
    return Ratio(value, float(low), float(high))
