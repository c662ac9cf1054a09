"""What a kernel is: attention on one device, returning output and LSE, with an explicit backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Kernel:
    """Attention on one device, forward and backward."""

    name: str
    forward: Forward
    """`forward(q_BNSD, k_BNTD, v_BNTD, causal, scale) -> out_BNSD, lse_BNS`; causal with S = T only."""
    backward: Backward
    """`backward(dout, q, k, v, out, lse, causal, scale) -> dq, dk, dv`."""
    native_gqa: bool = False
    """Whether it takes K and V with fewer heads than Q; for other kernels heads are repeated first."""
