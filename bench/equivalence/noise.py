"""How far one more training may be from trainings that do the same work in equivalent ways.

Rounding puts each of them somewhere about their mean. A new one is as far from that mean as they are, times
sqrt(1 + 1/m) for a mean of m, if it is equivalent: its mean square over theirs, each taken over one draw a
seed, then follows an F distribution. Steps of one training depend on each other, so a training counts as one
draw, whatever its length: that is exact where all steps move together, and wide where they do not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from bench.equivalence.trajectory import NAMES, ROUNDING, Limit, Signals, Trajectory, distance, mean_of

FALSE_ALARMS = 0.05
"""In how many comparisons of equivalent trainings, at most, any of them crosses the floor by chance."""
LEAST_FACTOR = 2.0
"""Of the deviation: the floor is no less, however many seeds there are. Sequence parallelism sums sp times as
many rounded pieces of a gradient as its controls do, whose errors add up to sqrt(sp) times theirs."""


@dataclass(frozen=True)
class Noise:
    """What equivalent trainings of one or more seeds show of it."""

    seeds: Sequence[Sequence[Trajectory]]
    """The equivalent trainings of each seed."""

    @cached_property
    def freedom(self) -> int:
        """Degrees of freedom: of each seed one fewer than its trainings, as one goes into their mean."""
        return sum(len(each) - 1 for each in self.seeds)

    @cached_property
    def deviation(self) -> Limit:
        """Of one training from the mean of all, root mean square; no less than one rounding in every step."""
        apart = [distance(one, mean_of(each)) for each in self.seeds if len(each) > 1 for one in each]
        found = _each(lambda *each: _root(sum(x * x for x in each) / max(self.freedom, 1)), apart)
        return _each(max, [found, *(_rounded(each[0]) for each in self.seeds)])

    def floor(self, seeds: int, trainings: int) -> Limit:
        """What the distance of each of so many compared trainings, over so many seeds, stays below."""
        from scipy.stats import f  # takes a second

        chance = FALSE_ALARMS / (max(trainings, 1) * len(NAMES))
        by_chance = math.sqrt(float(f.isf(chance, seeds, max(self.freedom, 1))))
        return self.deviation.times(max(LEAST_FACTOR, by_chance))


@dataclass(frozen=True, slots=True)
class Draw:
    """One training of one seed beside equivalent ones, itself not among them."""

    found: Trajectory
    others: Sequence[Trajectory]

    @property
    def centre(self) -> Trajectory:
        return mean_of(self.others)

    @property
    def widening(self) -> float:
        """By how much the mean of so few is itself uncertain."""
        return math.sqrt(1 + 1 / len(self.others))


def distance_of(draws: Sequence[Draw]) -> Limit:
    """Of one training from the mean of its equivalents, root mean square over its seeds."""
    apart = [distance(each.found, each.centre).times(1 / each.widening) for each in draws]
    return _each(lambda *found: _root(sum(x * x for x in found) / len(found)), apart)


def _rounded(training: Trajectory) -> Limit:
    """The distance of a training that is off by one rounding of float32 in every step."""
    off = [[(1 + ROUNDING) * each for each in getattr(training, name)] for name in NAMES]
    return distance(Signals(*off), training)


def _each(reduce: Callable[..., float], limits: Sequence[Limit]) -> Limit:
    """Both signals' numbers, each reduced to one."""
    return Limit(**{name: reduce(*(asdict(each)[name] for each in limits)) for name in NAMES})


def _root(value: float) -> float:
    return math.sqrt(value) if math.isfinite(value) else math.inf
