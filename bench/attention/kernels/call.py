"""One call of a kernel, whatever number of KV heads it takes; also as one differentiable function.

KV heads are repeated here and nowhere else, on the rank that computes and just before it does. A ring repeats
the block at hand in every ring step: repeated before they are sent, K and V would be as many bytes as Q.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.attention.kernels.kernel import Gradients, Kernel


def attend(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, kernel: Kernel, causal: bool) -> Tensor:
    """Differentiable attention of one device, [B, N, S, D], scaled by 1/sqrt(D)."""
    scale = q_BNSD.shape[-1] ** -0.5
    return attend_with_lse(q_BNSD, k_BKTD, v_BKTD, kernel=kernel, causal=causal, scale=scale)[0]


def attend_with_lse(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, kernel: Kernel, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Differentiable attention at any scale: output [B, N, S, D], and the LSE [B, N, S] with no gradient."""
    found: tuple[Tensor, Tensor] = _Attend.apply(q_BNSD, k_BKTD, v_BKTD, kernel, causal, scale)  # type: ignore[no-untyped-call]
    return found


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.call = kernel, causal, scale
        out, lse = kernel_forward(kernel, q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # else torch makes zeros for the gradient that the LSE has not
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
        kernel, causal, scale = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        grads = kernel_backward(kernel, dout, q, k, v, out, lse, causal=causal, scale=scale)
        return *grads, None, None, None


def kernel_forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, N, S, D] and LSE [B, N, S], KV heads repeated where the kernel needs it."""
    groups = _repeats(kernel, q, k)
    return kernel.forward(q, _repeat(k, groups), _repeat(v, groups), causal, scale)


def kernel_backward(
    kernel: Kernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> Gradients:
    """dq, dk, dv in the shapes of q, k, v: gradients of repeated KV heads are summed back."""
    return _backward(kernel, (dout, q, k, v, out, lse), causal, scale)


def kernel_backward_into(
    kernel: Kernel, into: Gradients, *tensors: Tensor, causal: bool, scale: float
) -> None:
    """Write the gradients of `kernel_backward` to given tensors: copied, unless the kernel fills them."""
    if kernel.fills_gradients and _repeats(kernel, *tensors[1:3]) == 1:
        _backward(kernel, tensors, causal, scale, into=into)
        return
    for given, gradient in zip(into, _backward(kernel, tensors, causal, scale), strict=True):
        given.copy_(gradient)


def _backward(
    kernel: Kernel, tensors: tuple[Tensor, ...], causal: bool, scale: float, **keywords: Gradients
) -> Gradients:
    dout, q, k, v, out, lse = tensors
    groups = _repeats(kernel, q, k)
    k, v = _repeat(k, groups), _repeat(v, groups)
    # CUDA kernels read the LSE as if it were contiguous; a ring's rows of a longer one are not.
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse.contiguous(), causal, scale, **keywords)
    return dq, _sum_groups(dk, groups), _sum_groups(dv, groups)


def _repeats(kernel: Kernel, q: Tensor, k: Tensor) -> int:
    """How often each KV head has to be repeated for this kernel on this device."""
    return 1 if q.device.type in kernel.native_gqa else q.shape[1] // k.shape[1]


def _repeat(kv: Tensor, groups: int) -> Tensor:
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=1)


def _sum_groups(grad: Tensor, groups: int) -> Tensor:
    return grad if groups == 1 else grad.unflatten(1, (-1, groups)).sum(dim=2)
