"""flash-attn's differentiable functions on any of our kernels, for the bridge.

Shapes: B batch, S query tokens, T key tokens of a sequence, Q and L those of all packed sequences, N query
heads, K KV heads, D head size. A causal mask is aligned to the bottom right: queries are the last tokens.
"""
# ruff: noqa: ARG001  windows, soft caps, slopes and dropout are parameters of flash-attn that are not used here

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.attention.kernels import Kernel, Packing, kernel_backward, kernel_forward
from bench.attention.packed import packed_backward, packed_forward

Attended = Tensor | tuple[Tensor, Tensor, None]
"""The output; where asked for, also the LSE, which has no gradient, and no probabilities."""


def flash_attn_func_on(kernel: Kernel) -> Callable[..., Attended]:
    """`flash_attn_func` of whole sequences."""

    def flash_attn_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Attended:
        """Output [B, S, N, D] and LSE [B, N, S]."""
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if causal and q.shape[1] < k.shape[1]:
            alone = [_last_of_a_sequence(kernel, *qkv, scale) for qkv in zip(q, k, v, strict=True)]
            out_BSND, lse_BNS = (_stacked(parts) for parts in zip(*alone, strict=True))
        else:
            out_BSND, lse_BNS = _Attend.apply(q, k, v, kernel, causal, scale)  # type: ignore[no-untyped-call]
        return (out_BSND, lse_BNS, None) if return_attn_probs else out_BSND

    return flash_attn_func


def flash_attn_varlen_func_on(kernel: Kernel) -> Callable[..., Attended]:
    """`flash_attn_varlen_func` of packed sequences."""

    def flash_attn_varlen_func(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
    ) -> Attended:
        """Output [Q, N, D] and LSE [N, Q]."""
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale)
        out_QND, lse_NQ = _AttendPacked.apply(q, k, v, kernel, packing)  # type: ignore[no-untyped-call]
        return (out_QND, lse_NQ, None) if return_attn_probs else out_QND

    return flash_attn_varlen_func


def _stacked(parts: tuple[Tensor, ...]) -> Tensor:
    """One alone without a copy: it is saved for backward already."""
    return parts[0][None] if len(parts) == 1 else torch.stack(parts)


def _last_of_a_sequence(
    kernel: Kernel, q_SND: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [S, N, D] and LSE [N, S] of a sequence's last queries; one alone, as no kernel takes more so."""
    queries, keys = len(q_SND), len(k_TKD)
    begins = torch.arange(
        2, dtype=torch.int32, device=q_SND.device
    )  # on the device: the host waits for nothing
    packing = Packing(begins * queries, begins * keys, queries, keys, causal=True, scale=scale)
    found: tuple[Tensor, Tensor] = _AttendPacked.apply(q_SND, k_TKD, v_TKD, kernel, packing)  # type: ignore[no-untyped-call]
    return found


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.call = kernel, causal, scale
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out_BNSD, lse_BNS = kernel_forward(kernel, q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out_BNSD, lse_BNS)
        ctx.mark_non_differentiable(lse_BNS)
        return out_BNSD.transpose(1, 2), lse_BNS

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        kernel, causal, scale = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        grads = kernel_backward(kernel, dout.transpose(1, 2), q, k, v, out, lse, causal=causal, scale=scale)
        return *(grad.transpose(1, 2) for grad in grads), None, None, None


class _AttendPacked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        ctx.call = kernel, packing
        out_QND, lse_NQ = packed_forward(kernel, q, k, v, packing)
        ctx.save_for_backward(q, k, v, out_QND, lse_NQ)
        ctx.mark_non_differentiable(lse_NQ)
        return out_QND, lse_NQ

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        kernel, packing = ctx.call
        *qkv, out, lse = ctx.saved_tensors
        q, k, v = qkv
        into = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        packed_backward(kernel, into, dout, (q, k, v), out, lse, packing)
        return *into, None, None
