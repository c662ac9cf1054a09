"""Comparison of every parameter's gradient in the first full-length step of two trainings of equal work.

A gradient enters by its norm and by sums of its elements with random signs, each element in one of the sums
(a count sketch, doi:10.1007/3-540-45465-9_59). For the difference e of two gradients the squares of the sums
add up to |e|^2 on average over the signs, which estimates |e|. The difference of the norms is at most |e|.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from bench.config import LOW_PRECISION
from bench.measure.losses.section import ONE_RANK_EFFECT, GradientMatch

Gradients = Mapping[str, Sequence[float | None]]
"""Norm of each parameter's gradient, then its sums with random signs, by parameter."""
FLOORS: Mapping[str, float] = {"fp64": 1e-6, "fp32": 1e-3, "fp16": 0.1, "bf16": 0.1}
"""Smallest limit of each dtype, even if less noise was measured. In bf16 gradients of random weights differed
by up to 1.8e-2."""
LIMIT_WITHOUT_NOISE = 0.3
"""Limit in 16-bit dtypes if the noise of the weights was not measured."""
NOISE_FACTOR = 12.0
"""Largest difference of a parameter's gradient in two correct trainings, in multiples of the error of the
whole gradient against float64 at up to 1,024 tokens. In 205 sound cells of five trained checkpoints it was
up to 7.6."""
NORM_NOISE_FACTOR = 24.0
"""Largest difference for the weights of norms, whose gradients have few elements; it was up to 15."""
SMALLEST_SHARE = 2.0**-14
"""Smallest share of the whole gradient's norm to which a difference is relative. Shorter gradients, such as
that of the bias of K, would be zero without rounding."""


def gradient_limit(name: str, dtype: str, noise: float | None) -> float:
    """Return the largest difference of a parameter's gradient in two correct trainings.

    Args:
        name: Name of the parameter.
        dtype: Dtype of the trainings.
        noise: Measured error of the whole gradient, relative to its length; None if it was not measured.
    """
    if noise is None:
        return LIMIT_WITHOUT_NOISE if dtype in LOW_PRECISION else FLOORS[dtype]
    return max(FLOORS[dtype], (NORM_NOISE_FACTOR if "norm" in name else NOISE_FACTOR) * noise)


def match_gradients(
    gradients: Gradients, reference: Gradients, dtype: str, noise: float | None
) -> GradientMatch | None:
    """Return the comparison with the gradients of a reference; None if one of the trainings has none.

    `noise` is that of `gradient_limit`.
    """
    if not gradients or not reference:
        return None
    values, expected = (_without_null(sums) for sums in (gradients, reference))
    least_norm = SMALLEST_SHARE * math.hypot(*(sums[0] for sums in expected.values()))
    limits = {name: gradient_limit(name, dtype, noise) for name in sorted({**gradients, **reference})}
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
    length = max(abs(values[0] - expected[0]), math.dist(values[1:], expected[1:]))
    return length / (max(expected[0], least_norm) or 1.0)
