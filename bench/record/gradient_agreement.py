"""Comparison of every parameter's gradient, and of the optimizer's first moment, in two equal trainings.

A gradient enters by sums of its elements with random signs, each element in one of the sums (a count sketch,
doi:10.1007/3-540-45465-9_59). The squares of the sums add up to the squared length of the gradient on average
over the signs, and so they do for the difference of two gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from bench.config import LOW_PRECISION, Cell
from bench.measure.losses.section import ONE_RANK_EFFECT, FirstMoment, GradientMatch, kind_of

Gradients = Mapping[str, Sequence[float | None]]
"""Sums with random signs over the elements of each parameter's gradient."""
FLOORS: Mapping[str, float] = {"fp64": 1e-6, "fp32": 1e-3, "fp16": 2e-2, "bf16": 2e-2}
"""Smallest limit of each dtype, even if less noise was measured. In bf16 gradients of random weights differed
by up to 1.2e-2, with ZeRO-3, which also reduces them in bf16."""
LIMIT_WITHOUT_NOISE = 0.3
"""Limit in 16-bit dtypes if the noise of the weights was not measured."""
NOISE_FACTOR = 8.0
"""Largest difference of a parameter's gradient or first moment in two correct trainings, in multiples of the
noise of its kind. The noise is the error against float64 of the same step on one device in the cell's dtype,
which the objective pass computes in three equivalent ways at up to 1,024 tokens."""
USUAL_LEARNING_RATE = 1e-3
"""Learning rate of AdamW up to which the limit does not depend on it."""
SMALLEST_SHARE = 2.0**-14
"""Smallest share of the whole gradient's norm to which a difference is relative. Shorter gradients, such as
that of the bias of K, would be zero without rounding."""


Noise = Mapping[str, float | None]
"""Measured relative error of gradients, by kind of parameter; empty if it was not measured."""


def gradient_limit(name: str, cell: Cell, noise: Noise) -> float:
    """Return the largest difference of the gradient of the parameter `name` in two correct trainings.

    Two updates precede the first full-length step. AdamW's are as long as the learning rate is, also in
    elements that are rounding errors.
    """
    measured, dtype = noise.get(kind_of(name)), cell.dtype
    if measured is None:
        return LIMIT_WITHOUT_NOISE if dtype in LOW_PRECISION else FLOORS[dtype]
    drift = cell.optimizer.learning_rate / USUAL_LEARNING_RATE if cell.optimizer.name == "adamw" else 1.0
    return max(1.0, drift) * max(FLOORS[dtype], NOISE_FACTOR * measured)


def match_moments(
    moment: FirstMoment | None, reference: FirstMoment | None, cell: Cell, noise: Noise
) -> GradientMatch | None:
    """Return the comparison of first moments; None if they are of different numbers of steps."""
    if moment is None or reference is None or moment.steps != reference.steps:
        return None
    return match_gradients(moment.sums, reference.sums, cell, noise, moment.steps)


def match_gradients(
    gradients: Gradients, reference: Gradients, cell: Cell, noise: Noise, steps: int = 1
) -> GradientMatch | None:
    """Return the comparison with the gradients of a reference; None if one of the trainings has none.

    The gradients may also be first moments after a number of `steps`. The limit grows with the root of this
    number, because rounding makes the weights of two trainings drift apart like a random walk.
    """
    if not gradients or not reference:
        return None
    values, expected = (_without_null(sums) for sums in (gradients, reference))
    least_norm = SMALLEST_SHARE * math.hypot(*itertools.chain.from_iterable(expected.values()))
    names = sorted({**gradients, **reference})
    limits = {name: math.sqrt(steps) * gradient_limit(name, cell, noise) for name in names}
    differences = {
        name: _difference(values[name], expected[name], least_norm)
        if name in values and name in expected
        else math.inf
        for name in limits
    }
    nearest = max(limits, key=lambda name: differences[name] / limits[name])
    return GradientMatch(
        parameters=len(limits),
        below_noise=sum(limit >= ONE_RANK_EFFECT for limit in limits.values()),
        parameter=nearest,
        difference=differences[nearest] if math.isfinite(differences[nearest]) else None,
        limit=limits[nearest],
        steps=steps,
    )


def _without_null(gradients: Gradients) -> dict[str, list[float]]:
    """Return the gradients of the parameters whose numbers are all finite."""
    return {
        name: [number for number in sums if number is not None]
        for name, sums in gradients.items()
        if None not in sums
    }


def _difference(values: Sequence[float], expected: Sequence[float], least_norm: float) -> float:
    """Return the length of the difference relative to the larger of the expected norm and `least_norm`."""
    return math.dist(values, expected) / (max(math.hypot(*expected), least_norm) or 1.0)
