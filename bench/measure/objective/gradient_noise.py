"""Distances of gradients from exact ones, and the limits that rounding alone explains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.measure.parity.section import FLOORS

FACTOR = 4.0
"""A sound step errs at most this many times as much as the controls do, root mean square."""
SCALE_FACTOR = 6.0
"""FACTOR for a gradient's scale. Three controls may show too little of one number by chance."""
CHANCE = 4.0
"""A random deviation has a part along a gradient that n numbers carry: about its own length / sqrt(n)."""
LOSS_BLOCK = 32
"""Rows whose loss is compared on its own: in the mean of all, errors of opposite signs cancel."""


@dataclass(frozen=True, slots=True)
class GradientDifference:
    """Sums over one parameter's numbers: its error follows once the whole exact gradient is known."""

    missed: float
    """Euclidean length of what differs; infinite where there is no gradient."""
    along: float
    """Product of what differs and the exact gradient."""
    square: float
    """Squared length of the exact gradient."""
    numbers: float
    """Number of numbers that carry the exact gradient, (sum g^2)^2 / sum g^4."""


@dataclass(frozen=True, slots=True)
class ExactGradient:
    """One parameter's gradient in float64, with the sums that every comparison needs."""

    gradient: Tensor
    square: float
    numbers: float

    @classmethod
    def of(cls, gradient: Tensor) -> ExactGradient:
        """Return the gradient with its sums."""
        wide = gradient.double()
        return cls(wide, float(torch.linalg.vector_norm(wide)) ** 2, _carrying(wide))

    def difference(self, found: Tensor | None, divisor: float = 1.0) -> GradientDifference:
        """Return how far a gradient, divided by `divisor`, is from this one."""
        if found is None:
            return GradientDifference(math.inf, math.inf, self.square, self.numbers)
        missed = found.to(self.gradient.device, torch.float64) / divisor
        missed -= self.gradient
        length = float(torch.linalg.vector_norm(missed))
        return GradientDifference(length, float(missed.mul_(self.gradient).sum()), self.square, self.numbers)


@dataclass(frozen=True, slots=True)
class GradientError:
    """Distance of a gradient from the exact one, relative to the exact one's Euclidean length.

    A gradient that is zero but for rounding (the bias of K nearly is) is measured by the whole model's.
    """

    distance: float
    """Distance of the whole gradient, relative."""
    scale: float
    """Distance along the exact gradient, positive where too long. Rounding has little of it, a wrong
    factor has nothing else."""
    numbers: float
    """Count of numbers that carry the exact gradient, (sum g^2)^2 / sum g^4: few do in the weight of a norm
    of heads. What is random in few numbers is parallel by chance."""
    share: float = 0.0
    """Share of the squared length of all compared gradients together."""


def gradient_errors(differences: Mapping[str, GradientDifference], eps: float) -> dict[str, GradientError]:
    """Return each parameter's error.

    A gradient shorter than `eps` times all compared ones together is measured by that length.
    """
    whole = sum(each.square for each in differences.values())
    errors = {}
    for name, each in differences.items():
        square = max(each.square, eps**2 * whole) or 1.0
        distance, scale = each.missed / math.sqrt(square), each.along / square
        errors[name] = GradientError(distance, scale, each.numbers, each.square / (whole or 1.0))
    return errors


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Loss of one computation of a step."""

    mean: float
    """Global mean over the valid tokens."""
    blocks: Tensor
    """Sums of the losses of `LOSS_BLOCK` rows each, as they count in the mean."""

    def error(self, found: float) -> float:
        """Return how far another mean is from this one, relative."""
        return abs(found - self.mean) / (abs(self.mean) or 1.0)

    def block_error(self, found: StepLoss) -> float:
        """Return the root mean square of a block's error, relative to its part of the loss in the mean."""
        counted = self.blocks != 0
        off = (found.blocks - self.blocks)[counted]
        mean = abs(self.mean) / max(1, int(counted.sum()))
        return float(off.square().mean().sqrt()) / (mean or 1.0) if off.numel() else 0.0


@dataclass(frozen=True, slots=True)
class GradientLimit:
    """How far a sound gradient may be from the exact one."""

    distance: float
    scale: float


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """How far rounded computations are from the exact one, root mean square over the controls."""

    loss: float
    """Of a block of rows, relative to the mean loss."""
    grad_norm: float
    """Of all compared gradients as one, relative to its length: a sound norm is off by less."""
    scale: float
    """Of one parameter's scale, each weighed by its share of the compared gradients."""
    whole_scale: float
    """Of the scale of all compared gradients as one."""
    gradients: Mapping[str, GradientError]

    def limits(self, name: str, dtype: str, distance: float) -> GradientLimit:
        """Of the gradient of a parameter, one that was found at this distance."""
        plain, floor = self.gradients[name], FLOORS[dtype].backward
        allowed = max(floor, FACTOR * plain.distance)
        by_chance = CHANCE * max(plain.distance, min(distance, allowed)) / math.sqrt(plain.numbers)
        return GradientLimit(allowed, max(floor, by_chance, SCALE_FACTOR * max(plain.scale, self.scale)))

    def whole_limit(self, dtype: str) -> float:
        """Of the scale of all: parameters that err independently of one another err less together.

        Three controls may all be near zero by chance, so what their parameters' errors come to counts, too.
        """
        independent = math.sqrt(sum((each.share * each.scale) ** 2 for each in self.gradients.values()))
        return max(FLOORS[dtype].backward, SCALE_FACTOR * max(self.whole_scale, independent))

    @classmethod
    def of(cls, losses: Sequence[float], errors: Sequence[Mapping[str, GradientError]]) -> GradientNoise:
        """Return the noise of controls, from the error of each one's loss and of its gradients."""
        gradients = {
            name: GradientError(
                _rms([each[name].distance for each in errors]),
                _rms([each[name].scale for each in errors]),
                one.numbers,
                one.share,
            )
            for name, one in errors[0].items()
        }
        return cls(
            loss=_rms(losses),
            grad_norm=_rms([_whole(each, "distance") for each in errors]),
            scale=_rms([_whole(each, "scale") for each in errors]),
            whole_scale=_rms([whole_scale(each) for each in errors]),
            gradients=gradients,
        )


def whole_scale(errors: Mapping[str, GradientError]) -> float:
    """By how much the gradients are too large as one, relative; nan where one is missing."""
    return sum(each.share * each.scale for each in errors.values())


def _carrying(gradient: Tensor) -> float:
    """How many numbers carry a gradient; all where it is zero."""
    largest = float(torch.linalg.vector_norm(gradient, math.inf))
    if not largest:
        return float(gradient.numel())
    squares = (gradient / largest).square_()  # of the largest 1: none of them underflows
    total = float(squares.sum())
    return total**2 / float(squares.square_().sum())


def _whole(errors: Mapping[str, GradientError], what: str) -> float:
    """The parameters' errors as one, each weighed by its share of the squared gradient."""
    return math.sqrt(sum(each.share * getattr(each, what) ** 2 for each in errors.values()))


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(each * each for each in values) / len(values))
