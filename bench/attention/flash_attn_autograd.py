"""flash-attn's differentiable functions on any of our kernels, for the bridge.

Shapes: B batch, S query tokens, T key tokens of a sequence, Q and L those of all packed sequences, N query
heads, K KV heads, D head size. A causal mask is aligned to the bottom right: queries are the last tokens.
"""
# ruff: noqa: ARG001  dropout is a parameter of flash-attn that is not used here, as are all after those named

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.attention.kernels import Kernel, Packing, attend_with_lse
from bench.attention.packed import attend_end_to_end

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
        *_: Any,
        return_attn_probs: bool = False,
        **__: Any,
    ) -> Attended:
        """Output [B, S, N, D] and LSE [B, N, S]."""
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if causal and q.shape[1] < k.shape[1]:
            alone = [_last_of_a_sequence(kernel, *qkv, scale) for qkv in zip(q, k, v, strict=True)]
            out_BSND, lse_BNS = (_stacked(parts) for parts in zip(*alone, strict=True))
        else:
            by_heads = (x.transpose(1, 2) for x in (q, k, v))
            out_BNSD, lse_BNS = attend_with_lse(*by_heads, kernel=kernel, causal=causal, scale=scale)
            out_BSND = out_BNSD.transpose(1, 2)
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
        *_: Any,
        return_attn_probs: bool = False,
        **__: Any,
    ) -> Attended:
        """Output [Q, N, D] and LSE [N, Q]."""
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        packing = Packing(cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, scale)
        out_QND, lse_NQ = attend_end_to_end(q, k, v, kernel=kernel, packing=packing)
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
    # On the device: the host waits for nothing.
    begins = torch.arange(2, dtype=torch.int32, device=q_SND.device)
    packing = Packing(begins * queries, begins * keys, queries, keys, causal=True, scale=scale)
    return attend_end_to_end(q_SND, k_TKD, v_TKD, kernel=kernel, packing=packing)
