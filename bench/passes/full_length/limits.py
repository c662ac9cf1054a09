"""How far a sound result may be from float64: some times as far as its control is, and at least a floor."""

from __future__ import annotations

from collections.abc import Mapping

CONTROL_FACTOR = 2.5
"""A sound result errs at most so many times as much as the control does."""
OUT_FLOORS: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-5}
"""Where control and strategy both err by rounding alone; in 16 bit the control decides."""
GRADIENT_FLOORS: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-3, "fp16": 3e-2, "bf16": 3e-2}
"""Torch's own kernel on a CPU errs more the longer the sequence: in bf16 by 6e-3 in `dq` at 32k, in `dk` and
`dv` of sampled keys by 1.1e-2 at 16k and by 4.6e-2 at 64k. `CPU_SCORES` ends their comparison at 17k where a
rank has one causal head, and before that where it has more."""
KEY_FLOORS: Mapping[str, float] = {**GRADIENT_FLOORS, "fp16": 5e-2, "bf16": 5e-2}
"""Of single keys, whose gradients may nearly cancel: `math` in bf16 erred by 3.5e-2 once SGD at learning rate
0.1 had trained for some steps."""
IDENTITY_LIMITS: Mapping[str, float] = {"fp64": 1e-9, "fp32": 1e-3, "fp16": 0.25, "bf16": 0.25}
"""The same kernel adds `dk` and `dv` up in few bits, so that in 16 bit only gross errors are told from it."""


def limit_of(floor: float, control: float) -> float:
    """The limit of a result whose control errs by so much."""
    return max(floor, CONTROL_FACTOR * control)
