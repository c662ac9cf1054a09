"""How far a sound result may be from float64: some times as far as plain attention of the same dtype is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FACTORS: Mapping[str, float] = {"out": 2.0, "lse": 2.0, "dq": 3.0, "dk": 4.0, "dv": 4.0, "loss": 3.0}
"""Strategies erred as much as plain attention in `out` and `dq`, up to 2.9 times as much in `dk` and `dv`; in
a probe's losses, whose control is one rank, up to 1.3 times."""


@dataclass(frozen=True, slots=True)
class Floor:
    """What is allowed however little plain attention errs: where both err by rounding alone it is chance."""

    forward: float
    backward: float
    loss: float


FLOORS: Mapping[str, Floor] = {
    "fp64": Floor(1e-12, 1e-12, 1e-12),
    "fp32": Floor(1e-5, 1e-5, 1e-5),
    "fp16": Floor(0.0, 2e-3, 1e-4),
    "bf16": Floor(0.0, 0.0, 1e-4),
}
"""In fp16 `math` erred by up to 1.1e-3 in `dq`, 2.6 times as much as plain attention."""


def limit_of(name: str, dtype: str, plain_error: float) -> float:
    """The limit of `out`, `lse`, `dq`, `dk` or `dv`, relative to the exact tensor's maximum, or of `loss`.

    So many times the error of plain arithmetic, finite also where that overflows, and at least the floor.
    """
    floor = FLOORS[dtype]
    least = floor.loss if name == "loss" else floor.backward if name.startswith("d") else floor.forward
    return max(least, FACTORS[name] * min(1.0, plain_error))
