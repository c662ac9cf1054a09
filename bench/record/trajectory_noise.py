"""Whether two trainings are the same one: loss and gradient norm, and the first step in which they part.

Rounding adds up like a random walk: in step s, from 0, two equal trainings may be sqrt(1 + s) times as far
apart as in the first. What it did to the parameters shows in the loss all the more the faster that moves. So
one number a signal says how far apart they are, whatever their length and learning rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import accumulate
from statistics import fmean
from typing import Protocol

from bench.config import LOW_PRECISION
from bench.measure.losses.section import LossesSection

NAMES: Mapping[str, str] = {"loss": "loss", "grad_norm": "gradient norm"}
ROUNDING = 2.0**-23
"""Relative: signals are float32, and no two are told apart by less."""
MOVED = 10.0
"""How much more a nat by which the loss has moved adds to what it may be apart than a nat of the loss itself.
In bf16 a loss that SGD without clipping moved by 1.9 nats in 5 steps was 1e-3 of that apart."""


class Trajectory(Protocol):
    """One training's signals, step by step."""

    @property
    def loss(self) -> Sequence[float]: ...

    @property
    def grad_norm(self) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class Signals:
    """A trajectory that no record holds."""

    loss: Sequence[float]
    grad_norm: Sequence[float]


def signals_of(losses: LossesSection, steps: int | None = None) -> Signals:
    """Return loss and gradient norm of the first `steps`, or all; nan for a number that is not finite."""
    loss, grad_norm = losses.loss[:steps], losses.grad_norm[:steps]
    return Signals(*([math.nan if each is None else each for each in signal] for signal in (loss, grad_norm)))


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far two trainings are apart, relative to what a step allows."""

    loss: float
    grad_norm: float

    def times(self, factor: float) -> Deviation:
        """So many times as much of each."""
        return Deviation(self.loss * factor, self.grad_norm * factor)

    def over(self, other: Deviation) -> Deviation:
        """Each as a multiple of the other's."""
        return Deviation(self.loss / other.loss, self.grad_norm / other.grad_norm)


LIMITS: Mapping[str, Deviation] = {
    "fp64": Deviation(1e-10, 1e-9),
    "fp32": Deviation(1e-5, 1e-4),
    "fp16": Deviation(2e-4, 3e-2),
    "bf16": Deviation(2e-4, 3e-2),
}
"""What is allowed by dtype however little noise was measured: five times what sound strategies showed on
random weights, whose logits are near zero."""
UNMEASURED = Deviation(1e-2, 0.15)
"""What is allowed in 16 bit where the noise of the weights was not measured. Sound cells of trained
checkpoints of some 1e6 parameters were up to 1.2e-3 and 5e-2 apart in the first step."""
NOISE_FACTOR = 4.0
"""Two sound trainings are in the first step at most this many times as far apart as measured rounding is from
float64, root mean square. The factor was fixed on one trained checkpoint of 0.9 million parameters."""


def limit_for(dtype: str, noise: Mapping[str, float | None]) -> Deviation:
    """What two trainings of this dtype may be apart; `noise` is by signal, empty where nobody measured it."""
    floor = LIMITS[dtype]
    if not noise:
        return UNMEASURED if dtype in LOW_PRECISION else floor
    return Deviation(*(max(getattr(floor, name), NOISE_FACTOR * (noise[name] or 0.0)) for name in NAMES))


def moved_for(dtype: str, limit: Deviation) -> float:
    """MOVED for such a limit: what a moved nat adds follows from the dtype, not from measured noise.

    The noise of trained weights is that of single rows. With MOVED times it, losses that differ from batch to
    batch would hide an update that was lost.
    """
    return MOVED * LIMITS[dtype].loss / limit.loss


def first_departure(
    found: Trajectory, reference: Trajectory, limit: Deviation, moved: float = MOVED
) -> str | None:
    """The first step in which one leaves the other, in words; None where no common step shows one."""
    for step, name, own, other, unit in _pairs(found, reference, moved):
        allowed = getattr(limit, name) * unit
        if not abs(own - other) <= allowed:
            said = f"step {step}: the {NAMES[name]} is {own:.6g}"
            return f"{said}, not within {allowed / (abs(other) or 1.0):.1e} of the {other:.6g}"
    return None


def distance(found: Trajectory, reference: Trajectory) -> Deviation:
    """The mean over all steps of how far one is from the other, each in multiples of what its step allows."""
    apart: dict[str, list[float]] = {name: [] for name in NAMES}
    for _, name, own, other, unit in _pairs(found, reference):
        off = abs(own - other) / (unit or 1.0)
        apart[name].append(off if math.isfinite(off) else math.inf)
    return Deviation(**{name: sum(each) / len(each) for name, each in apart.items()})


def mean_of(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Their mean in every step that all of them have."""
    losses, norms = (zip(*(getattr(each, name) for each in trajectories), strict=False) for name in NAMES)
    return Signals([*map(fmean, losses)], [*map(fmean, norms)])


def units(reference: Trajectory, moved: float = MOVED) -> Mapping[str, list[float]]:
    """By signal what a limit is a multiple of, step by step."""
    steps = range(len(reference.loss))
    nats = [max(abs(each - reference.loss[0]) for each in reference.loss[: step + 1]) for step in steps]
    # A gradient that has become small is known no better than while it was large.
    norms = accumulate((abs(norm) for norm in reference.grad_norm), max)
    return {
        "loss": [math.sqrt(1 + step) * abs(reference.loss[step]) + moved * nats[step] for step in steps],
        "grad_norm": [math.sqrt(1 + step) * norm for step, norm in zip(steps, norms, strict=False)],
    }


def _pairs(
    found: Trajectory, reference: Trajectory, moved: float = MOVED
) -> Iterator[tuple[int, str, float, float, float]]:
    """Of every step and signal that both have: the step, its name, both values, and what a unit is."""
    unit = units(reference, moved)
    for step in range(min(len(found.loss), len(reference.loss))):
        for name in NAMES:
            yield step, name, getattr(found, name)[step], getattr(reference, name)[step], unit[name][step]


FALSE_ALARMS = 0.05
"""Largest share of comparisons in which any of several equivalent trainings crosses the floor by chance."""
LEAST_FACTOR = 2.0
"""Smallest floor, in multiples of the controls' deviation, for any number of seeds. Sequence parallelism sums
sp times as many rounded pieces of a gradient as its controls do, whose errors add up to sqrt(sp) times
theirs."""


@dataclass(frozen=True)
class TrajectoryNoise:
    """How far one more training may be from trainings that do the same work in equivalent ways.

    Rounding puts each of them somewhere about their mean. A new one is as far from that mean as they are,
    times sqrt(1 + 1/m) for a mean of m, if it is equivalent: its mean square over theirs, each taken over one
    draw a seed, then follows an F distribution. Steps of one training depend on each other, so a training
    counts as one draw, whatever its length: that is exact where all steps move together, and wide where they
    do not.
    """

    seeds: Sequence[Sequence[Trajectory]]
    """The equivalent trainings of each seed."""

    @cached_property
    def freedom(self) -> int:
        """Degrees of freedom: of each seed one fewer than its trainings, as one goes into their mean."""
        return sum(len(each) - 1 for each in self.seeds)

    @cached_property
    def deviation(self) -> Deviation:
        """Of one training from the mean of all, root mean square; no less than one rounding in every step."""
        apart = [distance(one, mean_of(each)) for each in self.seeds if len(each) > 1 for one in each]
        found = _each(lambda *each: _root(sum(x * x for x in each) / max(self.freedom, 1)), apart)
        return _each(max, [found, *(_rounded(each[0]) for each in self.seeds)])

    def floor(self, seeds: int, trainings: int) -> Deviation:
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


def distance_of(draws: Sequence[Draw]) -> Deviation:
    """Of one training from the mean of its equivalents, root mean square over its seeds."""
    apart = [distance(each.found, each.centre).times(1 / each.widening) for each in draws]
    return _each(lambda *found: _root(sum(x * x for x in found) / len(found)), apart)


def _rounded(training: Trajectory) -> Deviation:
    """The distance of a training that is off by one rounding of float32 in every step."""
    off = [[(1 + ROUNDING) * each for each in getattr(training, name)] for name in NAMES]
    return distance(Signals(*off), training)


def _each(reduce: Callable[..., float], limits: Sequence[Deviation]) -> Deviation:
    """Both signals' numbers, each reduced to one."""
    return Deviation(**{name: reduce(*(asdict(each)[name] for each in limits)) for name in NAMES})


def _root(value: float) -> float:
    return math.sqrt(value) if math.isfinite(value) else math.inf
