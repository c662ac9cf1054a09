"""flash-attn's private functions, by its own signatures, computed by any of our kernels."""
# ruff: noqa: ARG001  windows, soft caps, slopes and dropout are flash-attn's; nobody here asks for them

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from bench.attention.kernels import Kernel, kernel_backward, kernel_forward
from bench.attention.packed import Packing, packed_backward, packed_forward


def forward_with(kernel: Kernel) -> Callable[..., tuple[Tensor, Tensor, None, None]]:
    """`_flash_attn_forward` of whole sequences."""

    def _flash_attn_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
    ) -> tuple[Tensor, Tensor, None, None]:
        """Output [B, S, N, D] and LSE [B, N, S]; the last two of flash-attn's four values are unused."""
        q_BNSD, k_BKTD, v_BKTD = (x.transpose(1, 2) for x in (q, k, v))
        out_BNSD, lse_BNS = kernel_forward(kernel, q_BNSD, k_BKTD, v_BKTD, causal=causal, scale=softmax_scale)
        return out_BNSD.transpose(1, 2), lse_BNS.float(), None, None

    return _flash_attn_forward


def backward_with(kernel: Kernel) -> Callable[..., None]:
    """`_flash_attn_backward` of whole sequences."""

    def _flash_attn_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        rng_state: Tensor | None = None,
    ) -> None:
        """Fills dq, dk and dv in place, [B, S, heads, D]."""
        dout, q, k, v, out = (x.transpose(1, 2) for x in (dout, q, k, v, out))
        grads = kernel_backward(kernel, dout, q, k, v, out, softmax_lse, causal=causal, scale=softmax_scale)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad.transpose(1, 2))

    return _flash_attn_backward


def varlen_forward_with(kernel: Kernel) -> Callable[..., tuple[Tensor, Tensor, None, None]]:
    """`_flash_attn_varlen_forward` of packed sequences."""

    def _flash_attn_varlen_forward(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool = False,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        return_softmax: bool = False,
    ) -> tuple[Tensor, Tensor, None, None]:
        """Output [T, N, D] and LSE [N, T]."""
        packing = Packing(cu_seqlens_q, cu_seqlens_k, causal, softmax_scale)
        return *packed_forward(kernel, q, k, v, packing), None, None

    return _flash_attn_varlen_forward


def varlen_backward_with(kernel: Kernel) -> Callable[..., None]:
    """`_flash_attn_varlen_backward` of packed sequences."""

    def _flash_attn_varlen_backward(
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        softmax_lse: Tensor,
        dq: Tensor,
        dk: Tensor,
        dv: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float,
        softmax_scale: float,
        causal: bool,
        window_size_left: int = -1,
        window_size_right: int = -1,
        softcap: float = 0.0,
        alibi_slopes: Tensor | None = None,
        deterministic: bool = False,
        rng_state: Tensor | None = None,
    ) -> None:
        """Fills dq, dk and dv in place, [T, heads, D]."""
        packing = Packing(cu_seqlens_q, cu_seqlens_k, causal, softmax_scale)
        grads = packed_backward(kernel, dout, (q, k, v), out, softmax_lse, packing)
        for into, grad in zip((dq, dk, dv), grads, strict=True):
            into.copy_(grad)

    return _flash_attn_varlen_backward
