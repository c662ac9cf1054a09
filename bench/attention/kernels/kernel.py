"""What a kernel is: attention on one device, returning output and LSE, with an explicit backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from bench.attention.kernels.packing import Packing

Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""
Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., Gradients]
PackedForward = Callable[[Tensor, Tensor, Tensor, Packing], tuple[Tensor, Tensor]]
PackedBackward = Callable[[Gradients, tuple[Tensor, ...], Packing], None]


@dataclass(frozen=True, slots=True)
class PackedKernel:
    """A kernel's own entry for sequences packed end to end."""

    devices: tuple[str, ...]
    """Where it has one."""
    forward: PackedForward
    """`forward(q_TND, k_TKD, v_TKD, packing) -> out_TND, lse_NT`."""
    backward: PackedBackward
    """`backward((dq, dk, dv), (dout, q, k, v, out, lse), packing)` writes to the given gradients.

    The LSE is contiguous.
    """


@dataclass(frozen=True, slots=True)
class Kernel:
    """Attention on one device, forward and backward."""

    name: str
    forward: Forward
    """`forward(q_BNSD, k_BNTD, v_BNTD, causal, scale) -> out_BNSD, lse_BNS`; causal with S = T only."""
    backward: Backward
    """`backward(dout, q, k, v, out, lse, causal, scale) -> dq, dk, dv`."""
    native_gqa: tuple[str, ...] = ()
    """Devices on which it takes K and V with fewer heads than Q; on others heads are repeated first."""
    fills_gradients: bool = False
    """Whether `backward(..., into=(dq, dk, dv))` writes to these tensors and allocates none."""
    packed: PackedKernel | None = None
    """Its own entry for packed sequences; without one they are taken one after another."""
    module: str | None = None
    """Of its package, what it calls; None where all of it is torch's."""
