"""What a kernel is: attention on one device, returning output and LSE, with an explicit backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Kernel:
    """`forward(q_BNSD, k_BNTD, v_BNTD, causal, scale) -> out_BNSD, lse_BNS` and its backward,
    `backward(dout, q, k, v, out, lse, causal, scale) -> dq, dk, dv`.

    `causal` is only ever asked of equally many queries and keys. `native_gqa` kernels take K and V with fewer
    heads than Q; for the others heads are repeated first.
    """

    name: str
    forward: Forward
    backward: Backward
    native_gqa: bool = False
