"""Kernel `flash_attn_4`: FlashAttention-4 for Hopper and Blackwell, from the package flash-attn-4.

The calls are those of torch's adapter to the package. The first call of each kind compiles a kernel.
"""

from __future__ import annotations

from torch import Tensor

from bench.attention.kernels.kernel import Gradients, Kernel, PackedKernel, Packing


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    q_BSND, k_BTKD, v_BTKD = (x.transpose(1, 2) for x in (q, k, v))
    out_BSND, lse_BNS, *_ = _flash_attn_fwd(
        q_BSND, k_BTKD, v_BTKD, softmax_scale=scale, causal=causal, return_lse=True
    )
    return out_BSND.transpose(1, 2), lse_BNS


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    from flash_attn.cute.interface import _flash_attn_bwd

    q_BSND, k_BTKD, v_BTKD, out_BSND, dout_BSND = (x.transpose(1, 2) for x in (q, k, v, out, dout))
    dq, dk, dv = _flash_attn_bwd(
        q_BSND, k_BTKD, v_BTKD, out=out_BSND, dout=dout_BSND, lse=lse, softmax_scale=scale, causal=causal,
        deterministic=False,
    )  # fmt: skip
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    out_TND, lse_NT, *_ = _flash_attn_fwd(
        q, k, v, cu_seqlens_q=packing.cu_seqlens_q, cu_seqlens_k=packing.cu_seqlens_k,
        max_seqlen_q=packing.max_seqlen_q, max_seqlen_k=packing.max_seqlen_k,
        softmax_scale=packing.scale, causal=packing.causal, return_lse=True,
    )  # fmt: skip
    return out_TND, lse_NT


def _packed_backward(into: Gradients, tensors: tuple[Tensor, ...], packing: Packing) -> None:
    """Compute the gradients and copy them to `into`; like torch's adapter, pass the package no buffers."""
    from flash_attn.cute.interface import _flash_attn_bwd

    dout, q, k, v, out, lse = tensors
    gradients = _flash_attn_bwd(
        q, k, v, out=out, dout=dout, lse=lse, softmax_scale=packing.scale, causal=packing.causal,
        cu_seqlens_q=packing.cu_seqlens_q, cu_seqlens_k=packing.cu_seqlens_k, deterministic=False,
    )  # fmt: skip
    for target, gradient in zip(into, gradients, strict=True):
        target.copy_(gradient)


KERNEL = Kernel(
    "flash_attn_4",
    _forward,
    _backward,
    native_gqa=("cuda",),
    packed=PackedKernel(_packed_forward, _packed_backward),
    module="flash_attn.cute.interface",
)
