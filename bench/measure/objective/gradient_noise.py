"""Distances of gradients from exact ones, and the limits that rounding alone explains.

Limits follow the controls: computations of the step in the cell's dtype that would be equal in exact
arithmetic, and differ in how attention rounds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.measure.facts import worst_by_name
from bench.measure.losses.section import kind_of
from bench.measure.parity.section import FLOORS

FACTOR = 4.0
"""Largest error of a sound step, as a multiple of the controls' root mean square error."""
ALONG_FACTOR = 1.5
"""Largest error of a gradient's scale, as a multiple of the controls' root mean square distance.

By chance all three controls may have a small error of the scale, a single number, but not a small distance.
Along the exact gradient a sound deviation had up to 0.65 of its length."""
WHOLE_FACTOR = 6.0
"""Largest error of the scale of all gradients, as a multiple of the controls' root mean square error.

It is larger than FACTOR, because by chance all three controls may have a small error of one number."""
CHANCE = 4.0
"""Largest part along a gradient of n numbers of a random deviation with length l, in units of l / sqrt(n)."""
LOSS_BLOCK = 32
"""Number of tokens whose losses are compared as one sum. In the mean of all tokens, errors of opposite signs
would cancel."""


@dataclass(frozen=True, slots=True)
class GradientDifference:
    """Difference of one parameter's gradient from the exact one, before it is divided by a gradient's length.

    `gradient_errors` divides it once the length of the whole exact gradient is known.
    """

    length: float
    """Euclidean length of the difference; infinite if there is no gradient."""
    along: float
    """Dot product of the difference and the exact gradient."""
    exact_square: float
    """Squared length of the exact gradient."""
    effective_count: float
    """Effective number of elements of the exact gradient, (sum g^2)^2 / sum g^4."""


@dataclass(frozen=True, slots=True)
class ExactGradient:
    """One parameter's gradient in float64, with the sums that every comparison needs."""

    gradient: Tensor
    square: float
    """Squared Euclidean length of the gradient."""
    effective_count: float
    """Effective number of elements of the gradient, (sum g^2)^2 / sum g^4."""

    @classmethod
    def from_tensor(cls, gradient: Tensor) -> ExactGradient:
        """Return the gradient in float64 with its sums."""
        exact = gradient.double()
        return cls(exact, float(torch.linalg.vector_norm(exact)) ** 2, _effective_count(exact))

    def difference(self, gradient: Tensor | None) -> GradientDifference:
        """Return the difference of another gradient from this one; an infinite one for None."""
        if gradient is None:
            return GradientDifference(math.inf, math.inf, self.square, self.effective_count)
        deviation = gradient.to(self.gradient.device, torch.float64) - self.gradient
        length = float(torch.linalg.vector_norm(deviation))
        along = float(deviation.mul_(self.gradient).sum())
        return GradientDifference(length, along, self.square, self.effective_count)


@dataclass(frozen=True, slots=True)
class GradientError:
    """Error of one parameter's gradient, relative to the Euclidean length of the exact gradient.

    The error of a gradient that would be zero without rounding, such as that of the bias of K, is relative to
    the dtype's eps times the length of all compared gradients.
    """

    distance: float
    """Length of the difference."""
    scale: float
    """Part of the difference along the exact gradient; positive if the gradient is too long. It is small with
    rounding errors, and the whole difference with a wrong factor."""
    effective_count: float
    """Effective number of elements of the exact gradient, (sum g^2)^2 / sum g^4. If it is small, as for the
    weight of a norm over heads, a random difference may by chance be parallel to the gradient."""
    share: float = 0.0
    """Share of the squared length of all compared gradients."""
    exact_square: float = 1.0
    """Squared length of the exact gradient in the units of `distance`; below 1 if rounding outweighs it."""

    def divided_by(self, factor: float) -> GradientError:
        """Return the error of the gradient after division by a factor."""
        change = 1 / factor - 1
        square = (self.distance / factor) ** 2 + change * (
            2 * self.scale / factor + change * self.exact_square
        )
        scale = self.scale / factor + change * self.exact_square
        return replace(self, distance=math.sqrt(max(square, 0.0)), scale=scale)


def gradient_errors(differences: Mapping[str, GradientDifference], eps: float) -> dict[str, GradientError]:
    """Return the error of each parameter's gradient.

    Errors of a gradient shorter than `eps` times the length of all compared gradients are relative to this
    product.
    """
    whole = sum(difference.exact_square for difference in differences.values())
    errors = {}
    for name, difference in differences.items():
        square = max(difference.exact_square, eps**2 * whole) or 1.0
        errors[name] = GradientError(
            distance=difference.length / math.sqrt(square),
            scale=difference.along / square,
            effective_count=difference.effective_count,
            share=difference.exact_square / (whole or 1.0),
            exact_square=difference.exact_square / square,
        )
    return errors


@dataclass(frozen=True, slots=True)
class StepLoss:
    """Loss of one computation of a step."""

    mean: float
    """Global mean over the valid tokens."""
    blocks: Tensor
    """Contribution of each block of `LOSS_BLOCK` tokens to the mean."""

    def error(self, mean: float) -> float:
        """Return the relative difference of another computation's mean from this mean."""
        return abs(mean - self.mean) / (abs(self.mean) or 1.0)

    def block_error(self, other: StepLoss) -> float:
        """Return the root mean square difference of blocks, relative to the mean contribution of a block."""
        is_counted = self.blocks != 0
        differences = (other.blocks - self.blocks)[is_counted]
        mean = abs(self.mean) / max(1, int(is_counted.sum()))
        return float(differences.square().mean().sqrt()) / (mean or 1.0) if differences.numel() else 0.0


@dataclass(frozen=True, slots=True)
class GradientLimit:
    """Largest error of a sound gradient."""

    distance: float
    """Limit of `GradientError.distance`."""
    scale: float
    """Limit of the absolute `GradientError.scale`."""


@dataclass(frozen=True, slots=True)
class GradientNoise:
    """Errors of the controls, root mean square over the controls."""

    loss: float
    """Error of the loss of a block of tokens, relative to the mean contribution of a block."""
    grad_norm: float
    """Error of all compared gradients as one vector, relative to the vector's length. It bounds the error of
    the norm."""
    scale: float
    """Error of the scale of a parameter's gradient, root mean square weighted by the parameters' shares."""
    whole_scale: float
    """Error of the scale of all compared gradients as one vector."""
    gradients: Mapping[str, GradientError]
    """Errors of each parameter's gradient, by name."""

    def limits(self, name: str, dtype: str, distance: float) -> GradientLimit:
        """Return the limits of the gradient of the parameter `name`, whose error has this `distance`."""
        noise, floor = self.gradients[name], FLOORS[dtype].backward
        allowed = max(floor, FACTOR * noise.distance)
        by_chance = CHANCE * max(noise.distance, min(distance, allowed)) / math.sqrt(noise.effective_count)
        scale = max(FACTOR * max(noise.scale, self.scale), ALONG_FACTOR * noise.distance, by_chance)
        return GradientLimit(allowed, max(floor, scale))

    def by_kind(self) -> dict[str, float]:
        """Return the largest error of a parameter's gradient over all layers, by `kind_of` the parameter."""
        return worst_by_name([{kind_of(name): error.distance} for name, error in self.gradients.items()])

    def whole_limit(self, dtype: str) -> float:
        """Return the limit of the scale of all compared gradients as one vector.

        It is smaller than the limit of one parameter, because independent errors of parameters partly
        cancel. By chance all three controls may have almost no error of this scale, so the error that
        independent errors of the parameters would have is used if it is larger.
        """
        independent = math.sqrt(sum((error.share * error.scale) ** 2 for error in self.gradients.values()))
        return max(FLOORS[dtype].backward, WHOLE_FACTOR * max(self.whole_scale, independent))

    @classmethod
    def from_controls(
        cls, losses: Sequence[float], controls: Sequence[Mapping[str, GradientError]]
    ) -> GradientNoise:
        """Return the noise from each control's error of the loss, and of the gradients by parameter."""
        gradients = {
            name: GradientError(
                _rms([errors[name].distance for errors in controls]),
                _rms([errors[name].scale for errors in controls]),
                error.effective_count,
                error.share,
            )
            for name, error in controls[0].items()
        }
        return cls(
            loss=_rms(losses),
            grad_norm=_rms(
                [
                    math.sqrt(sum(error.share * error.distance**2 for error in errors.values()))
                    for errors in controls
                ]
            ),
            scale=_rms(
                [
                    math.sqrt(sum(error.share * error.scale**2 for error in errors.values()))
                    for errors in controls
                ]
            ),
            whole_scale=_rms([whole_scale(errors) for errors in controls]),
            gradients=gradients,
        )


def whole_scale(errors: Mapping[str, GradientError]) -> float:
    """Return the error of the scale of all gradients as one vector, with its sign; nan if one is missing."""
    return sum(error.share * error.scale for error in errors.values())


def _effective_count(gradient: Tensor) -> float:
    """Return (sum g^2)^2 / sum g^4, or the number of all elements if the gradient is zero."""
    largest = float(torch.linalg.vector_norm(gradient, math.inf))
    if not largest:
        return float(gradient.numel())
    squares = (gradient / largest).square_()  # without the division squares may underflow
    total = float(squares.sum())
    return total**2 / float(squares.square_().sum())


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values))
