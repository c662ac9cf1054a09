"""One call of a kernel, whatever number of KV heads it takes."""

from __future__ import annotations

from torch import Tensor

from bench.attention.kernels.kernel import Kernel


def kernel_forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, N, S, D] and LSE [B, N, S], KV heads repeated where the kernel needs it."""
    groups = 1 if kernel.native_gqa else q.shape[1] // k.shape[1]
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
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv in the shapes of q, k, v: gradients of repeated KV heads are summed back."""
    groups = 1 if kernel.native_gqa else q.shape[1] // k.shape[1]
    # CUDA kernels read the LSE as if it were contiguous; a ring's rows of a longer one are not.
    lse = lse.contiguous()
    dq, dk, dv = kernel.backward(dout, q, _repeat(k, groups), _repeat(v, groups), out, lse, causal, scale)
    return dq, _sum_groups(dk, groups), _sum_groups(dv, groups)


def _repeat(kv: Tensor, groups: int) -> Tensor:
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=1)


def _sum_groups(grad: Tensor, groups: int) -> Tensor:
    return grad if groups == 1 else grad.unflatten(1, (-1, groups)).sum(dim=2)
