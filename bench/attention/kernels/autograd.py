"""A kernel as one differentiable function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.attention.kernels.call import kernel_backward, kernel_forward
from bench.attention.kernels.kernel import Kernel


def attend(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, kernel: Kernel, causal: bool) -> Tensor:
    """Differentiable attention of one device, [B, N, S, D], scaled by 1/sqrt(D)."""
    scale = q_BNSD.shape[-1] ** -0.5
    out: Tensor = _Attend.apply(q_BNSD, k_BKTD, v_BKTD, kernel, causal, scale)  # type: ignore[no-untyped-call]
    return out


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, causal: bool, scale: float
    ) -> Tensor:
        ctx.call = kernel, causal, scale
        out, lse = kernel_forward(kernel, q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        kernel, causal, scale = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        grads = kernel_backward(kernel, dout, q, k, v, out, lse, causal=causal, scale=scale)
        return *grads, None, None, None
