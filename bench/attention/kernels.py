"""Attention on one device, returning output and LSE, with an explicit backward.

Shapes: B batch, N query heads, K KV heads, S query tokens, T key tokens, D head size. LSE is the natural
log-sum-exp of the scaled scores, [B, N, S].
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Kernel:
    """`forward(q_BNSD, k_BNTD, v_BNTD, causal, scale) -> out_BNSD, lse_BNS` and its backward,
    `backward(dout, q, k, v, out, lse, causal, scale) -> dq, dk, dv`.

    `native_gqa` kernels take K and V with fewer heads than Q; for the others heads are repeated first.
    """

    name: str
    forward: Forward
    backward: Backward
    available: Callable[[], bool]
    native_gqa: bool = False


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
    dq, dk, dv = kernel.backward(dout, q, _repeat(k, groups), _repeat(v, groups), out, lse, causal, scale)
    return dq, _sum_groups(dk, groups), _sum_groups(dv, groups)


def _repeat(kv: Tensor, groups: int) -> Tensor:
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=1)


def _sum_groups(grad: Tensor, groups: int) -> Tensor:
    return grad if groups == 1 else grad.unflatten(1, (-1, groups)).sum(dim=2)


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores_BNST = torch.matmul(q, k.transpose(-2, -1)) * scale
    if not causal:
        return scores_BNST
    mask = torch.ones(scores_BNST.shape[-2:], dtype=torch.bool, device=q.device).triu(diagonal=1)
    return scores_BNST.masked_fill(mask, float("-inf"))


def _math_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores_BNST = _scores(q, k, causal, scale)
    lse_BNS = torch.logsumexp(scores_BNST, dim=-1)
    return torch.matmul(torch.exp(scores_BNST - lse_BNS[..., None]), v), lse_BNS


def _math_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of FlashAttention-2 (arXiv:2307.08691, algorithm 2) without its tiling."""
    probs_BNST = torch.exp(_scores(q, k, causal, scale) - lse[..., None].to(q.dtype))
    dprobs_BNST = torch.matmul(dout, v.transpose(-2, -1))
    delta_BNS1 = (dout * out).sum(dim=-1, keepdim=True)
    dscores_BNST = probs_BNST * (dprobs_BNST - delta_BNS1) * scale
    dq = torch.matmul(dscores_BNST, k)
    dk = torch.matmul(dscores_BNST.transpose(-2, -1), q)
    dv = torch.matmul(probs_BNST.transpose(-2, -1), dout)
    return dq, dk, dv


def _torch_flash_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    return out, lse


def _torch_flash_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        # Without dropout the random state is never read; without packing the offsets are not either.
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, unused, unused,
            scale=scale,
        )  # fmt: skip
    return grads[0], grads[1], grads[2]


def _flash_attn_2_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward

    q_BSND, k_BTKD, v_BTKD = (x.transpose(1, 2) for x in (q, k, v))
    out_BSND, lse_BNS, *_ = _flash_attn_forward(
        q_BSND, k_BTKD, v_BTKD, dropout_p=0.0, softmax_scale=scale, causal=causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    return out_BSND.transpose(1, 2), lse_BNS


def _flash_attn_2_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_backward

    tensors = [x.transpose(1, 2).contiguous() for x in (dout, q, k, v, out)]
    grads = [torch.empty_like(x) for x in tensors[1:4]]
    _flash_attn_backward(
        *tensors, lse, *grads, dropout_p=0.0, softmax_scale=scale, causal=causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)


def _always() -> bool:
    return True


def _flash_attn_installed() -> bool:
    return torch.cuda.is_available() and importlib.util.find_spec("flash_attn") is not None


KERNELS: Mapping[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("math", _math_forward, _math_backward, _always),
        Kernel("torch_flash", _torch_flash_forward, _torch_flash_backward, _always),
        Kernel(
            "flash_attn_2",
            _flash_attn_2_forward,
            _flash_attn_2_backward,
            _flash_attn_installed,
            native_gqa=True,
        ),
    )
}
