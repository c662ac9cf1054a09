"""Comparison of the losses and gradient norms of trainings that should be equivalent.

Rounding errors add up like a random walk: in step s, counted from 0, two equivalent trainings may differ
sqrt(1 + s) times as much as in the first. The effect of an error on the loss grows with the speed at which
the loss moves. Each step therefore has a unit that grows in the same way, and a deviation is a multiple of
its step's unit. One limit per signal then holds for any number of steps and any learning rate.

Two comparisons use deviations. `first_departure` compares every step with a fixed limit. `TrajectoryNoise`
gives the noise floor for the mean over steps, from trainings that compute the same in equivalent ways.
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

SIGNAL_NAMES: Mapping[str, str] = {"loss": "loss", "grad_norm": "gradient norm"}
"""Signals of a training, with their names in sentences."""
ROUNDING = 2.0**-23
"""Relative rounding error of a signal, which is a float32 number."""
MOVEMENT_WEIGHT = 10.0
"""Weight of the nats by which the loss has moved since the first step, in the unit of the loss. The loss
itself has weight 1. In bf16, losses that SGD without clipping moved by 1.9 nats in 5 steps differed by 1e-3
of this movement."""


class Trajectory(Protocol):
    """Loss and gradient norm of one training in each step."""

    @property
    def loss(self) -> Sequence[float]: ...

    @property
    def grad_norm(self) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class Signals:
    """Trajectory that is not stored in a record."""

    loss: Sequence[float]
    grad_norm: Sequence[float]


def signals_of(losses: LossesSection, steps: int | None = None) -> Signals:
    """Return loss and gradient norm of the first `steps` steps, or of all steps, with nan for null."""
    signals = losses.loss[:steps], losses.grad_norm[:steps]
    return Signals(*([math.nan if value is None else value for value in signal] for signal in signals))


@dataclass(frozen=True, slots=True)
class Deviation:
    """Difference of two trainings in both signals, in multiples of a step's unit (see `units`)."""

    loss: float
    grad_norm: float

    def times(self, factor: float) -> Deviation:
        """Return the deviation multiplied by a factor."""
        return Deviation(self.loss * factor, self.grad_norm * factor)

    def divided_by(self, other: Deviation) -> Deviation:
        """Return the quotient of this deviation and another, separately for both signals."""
        return Deviation(self.loss / other.loss, self.grad_norm / other.grad_norm)


LIMITS: Mapping[str, Deviation] = {
    "fp64": Deviation(1e-10, 1e-9),
    "fp32": Deviation(1e-5, 1e-4),
    "fp16": Deviation(2e-4, 3e-2),
    "bf16": Deviation(2e-4, 3e-2),
}
"""Smallest limit of each dtype, even if less noise was measured. It is five times the deviation of correct
strategies on random weights, whose logits are near zero."""
LIMIT_WITHOUT_NOISE = Deviation(1e-2, 0.15)
"""Limit in 16-bit dtypes if the noise of the weights was not measured. Correct cells of trained checkpoints
with about 1e6 parameters differed by up to 1.2e-3 and 5e-2 in the first step."""
NOISE_FACTOR = 4.0
"""Largest deviation of two correct trainings in the first step, in multiples of the measured rounding error
against float64 (root mean square). The factor was determined on one trained checkpoint with 0.9 million
parameters."""


def limit_for(dtype: str, noise: Mapping[str, float | None]) -> Deviation:
    """Return the largest deviation of two correct trainings.

    Args:
        dtype: Dtype of the trainings.
        noise: Measured noise of each signal; empty if it was not measured.
    """
    floor = LIMITS[dtype]
    if not noise:
        return LIMIT_WITHOUT_NOISE if dtype in LOW_PRECISION else floor
    return Deviation(
        *(max(getattr(floor, name), NOISE_FACTOR * (noise[name] or 0.0)) for name in SIGNAL_NAMES)
    )


def movement_weight(dtype: str, limit: Deviation) -> float:
    """Return the weight of the loss's movement for a comparison with this limit.

    Limit times weight is the same for every limit of a dtype. A limit that is larger because more noise was
    measured thus allows no larger difference per nat of movement. Otherwise losses that differ from batch to
    batch, and therefore move much, would hide a lost update.
    """
    return MOVEMENT_WEIGHT * LIMITS[dtype].loss / limit.loss


def first_departure(
    training: Trajectory, reference: Trajectory, limit: Deviation, weight: float = MOVEMENT_WEIGHT
) -> str | None:
    """Describe the first step in which a training exceeds the limit of its deviation from a reference.

    Args:
        training: Training to check.
        reference: Training to compare with.
        limit: Largest deviation, in multiples of a step's unit.
        weight: Weight of the movement of the loss, as from `movement_weight`.

    Returns:
        A text such as `step 3: the loss is 1.683, not within 6.5e-03 of the 1.655`; None if no step that both
        have exceeds the limit.
    """
    for pair in _pairs(training, reference, weight):
        allowed = getattr(limit, pair.signal) * pair.unit
        if not abs(pair.value - pair.reference) <= allowed:
            return (
                f"step {pair.step}: the {SIGNAL_NAMES[pair.signal]} is {pair.value:.6g}, not within"
                f" {allowed / (abs(pair.reference) or 1.0):.1e} of the {pair.reference:.6g}"
            )
    return None


def deviation_between(training: Trajectory, reference: Trajectory) -> Deviation:
    """Return the mean deviation of a training from a reference over all steps that both have."""
    deviations: dict[str, list[float]] = {name: [] for name in SIGNAL_NAMES}
    for pair in _pairs(training, reference):
        deviation = abs(pair.value - pair.reference) / (pair.unit or 1.0)
        deviations[pair.signal].append(deviation if math.isfinite(deviation) else math.inf)
    return Deviation(**{name: sum(values) / len(values) for name, values in deviations.items()})


def mean_of(trajectories: Sequence[Trajectory]) -> Trajectory:
    """Return the mean of several trainings for each step that all of them have."""
    losses, norms = (
        zip(*(getattr(trajectory, name) for trajectory in trajectories), strict=False)
        for name in SIGNAL_NAMES
    )
    return Signals([*map(fmean, losses)], [*map(fmean, norms)])


def units(reference: Trajectory, weight: float = MOVEMENT_WEIGHT) -> Mapping[str, list[float]]:
    """Return the unit of each step for both signals. Limits and deviations are multiples of it."""
    steps = range(len(reference.loss))
    # Largest distance of the loss from the first loss, up to each step.
    movements = [max(abs(loss - reference.loss[0]) for loss in reference.loss[: step + 1]) for step in steps]
    # The error of a gradient norm that has become small is still that of the earlier, larger gradients.
    norms = accumulate((abs(norm) for norm in reference.grad_norm), max)
    return {
        "loss": [
            math.sqrt(1 + step) * abs(reference.loss[step]) + weight * movements[step] for step in steps
        ],
        "grad_norm": [math.sqrt(1 + step) * norm for step, norm in zip(steps, norms, strict=False)],
    }


@dataclass(frozen=True, slots=True)
class SignalPair:
    """Values of one signal in the same step of a training and of its reference."""

    step: int
    signal: str
    """`loss` or `grad_norm`."""
    value: float
    reference: float
    unit: float
    """Unit of the step's deviation."""


def _pairs(
    training: Trajectory, reference: Trajectory, weight: float = MOVEMENT_WEIGHT
) -> Iterator[SignalPair]:
    """Yield the values of both signals in every step that both trainings have."""
    step_units = units(reference, weight)
    for step in range(min(len(training.loss), len(reference.loss))):
        for name in SIGNAL_NAMES:
            values = getattr(training, name)[step], getattr(reference, name)[step]
            yield SignalPair(step, name, *values, step_units[name][step])


FALSE_ALARMS = 0.05
"""Largest probability that any of several equivalent trainings exceeds the noise floor by chance."""
MIN_NOISE_FACTOR = 2.0
"""Smallest noise floor for any number of seeds, in multiples of the controls' deviation. Training on sp ranks
that share a sequence sums sp times as many rounded parts of a gradient as a control does. Its errors may
therefore be sqrt(sp) times as large."""


@dataclass(frozen=True)
class TrajectoryNoise:
    """Noise of trainings that compute the same in equivalent ways: the controls.

    Rounding scatters the m controls of a seed around their mean. An equivalent new training scatters as much,
    but around another point: its deviation from the controls' mean is sqrt(1 + 1/m) times as large. Without
    this factor, the mean square of its deviations over seeds and that of the controls' deviations are two
    estimates of one variance. Their quotient follows an F distribution. A training counts as one draw for any
    number of steps, because its steps depend on each other. This is exact if all steps deviate together.
    Otherwise the floor is higher than necessary.
    """

    seeds: Sequence[Sequence[Trajectory]]
    """Controls of each seed."""

    @cached_property
    def freedom(self) -> int:
        """Degrees of freedom: the controls less one for each seed, whose mean is estimated from them."""
        return sum(len(controls) - 1 for controls in self.seeds)

    @cached_property
    def deviation(self) -> Deviation:
        """Root mean square deviation of a control from the mean of its seed's controls.

        It is at least the deviation that one float32 rounding in every step causes.
        """
        deviations = [
            deviation_between(control, mean_of(controls))
            for controls in self.seeds
            if len(controls) > 1
            for control in controls
        ]
        measured = _reduce(
            lambda *values: _root(sum(value * value for value in values) / max(self.freedom, 1)), deviations
        )
        return _reduce(max, [measured, *(_rounding_deviation(controls[0]) for controls in self.seeds)])

    def floor(self, seeds: int, trainings: int) -> Deviation:
        """Return the noise floor: the largest deviation of equivalent trainings.

        Args:
            seeds: Number of seeds over which a training's deviation is averaged.
            trainings: Number of compared trainings. The floor grows with it, so that FALSE_ALARMS holds for
                all of them together.
        """
        from scipy.stats import f  # takes a second

        chance = FALSE_ALARMS / (max(trainings, 1) * len(SIGNAL_NAMES))
        by_chance = math.sqrt(float(f.isf(chance, seeds, max(self.freedom, 1))))
        return self.deviation.times(max(MIN_NOISE_FACTOR, by_chance))


@dataclass(frozen=True, slots=True)
class ControlledTraining:
    """A training of one seed, and the controls that it is compared with."""

    training: Trajectory
    controls: Sequence[Trajectory]
    """Controls of the seed, without the training itself."""

    @property
    def centre(self) -> Trajectory:
        """Mean of the controls."""
        return mean_of(self.controls)

    @property
    def widening(self) -> float:
        """Factor on the deviation from `centre` because the mean of few controls is itself uncertain."""
        return math.sqrt(1 + 1 / len(self.controls))


def deviation_of(draws: Sequence[ControlledTraining]) -> Deviation:
    """Return the root mean square over seeds of a training's deviation from the mean of its controls."""
    deviations = [deviation_between(draw.training, draw.centre).times(1 / draw.widening) for draw in draws]
    return _reduce(lambda *values: _root(sum(value * value for value in values) / len(values)), deviations)


def _rounding_deviation(training: Trajectory) -> Deviation:
    """Return the deviation from a training of one that is off by one float32 rounding in every step."""
    rounded = [[(1 + ROUNDING) * value for value in getattr(training, name)] for name in SIGNAL_NAMES]
    return deviation_between(Signals(*rounded), training)


def _reduce(function: Callable[..., float], deviations: Sequence[Deviation]) -> Deviation:
    """Reduce several deviations to one, separately for both signals."""
    return Deviation(
        **{name: function(*(asdict(deviation)[name] for deviation in deviations)) for name in SIGNAL_NAMES}
    )


def _root(value: float) -> float:
    """Return the square root; infinity if the value is infinite or NaN, which is no small noise."""
    return math.sqrt(value) if math.isfinite(value) else math.inf
