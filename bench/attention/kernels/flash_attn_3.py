"""Kernel `flash_attn_3`: FlashAttention-3 for Hopper, from the module `flash_attn_interface`.

The module is built from the folder `hopper` of flash-attention. Its functions are torch custom operators.
Older builds take other arguments, so that the first call raises a TypeError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.attention.kernels.kernel import Gradients, Kernel, PackedKernel, Packing


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_forward

    q_BSND, k_BTKD, v_BTKD = (x.transpose(1, 2) for x in (q, k, v))
    out_BSND, lse_BNS, *_ = _flash_attn_forward(q_BSND, k_BTKD, v_BTKD, softmax_scale=scale, causal=causal)
    return out_BSND.transpose(1, 2), lse_BNS


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    into: Gradients | None = None,
) -> Gradients:
    from flash_attn_interface import _flash_attn_backward

    tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    if into is None:
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[1:4])
    else:
        dq, dk, dv = (x.transpose(1, 2) for x in into)
    _flash_attn_backward(
        *tensors, lse, dq=dq, dk=dk, dv=dv, softmax_scale=scale, is_causal=causal, deterministic=False
    )
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    from flash_attn_interface import _flash_attn_forward

    out_TND, lse_NT, *_ = _flash_attn_forward(
        q, k, v, **_offsets(packing), softmax_scale=packing.scale, causal=packing.causal
    )
    return out_TND, lse_NT


def _packed_backward(into: Gradients, tensors: tuple[Tensor, ...], packing: Packing) -> None:
    from flash_attn_interface import _flash_attn_backward

    dq, dk, dv = into
    _flash_attn_backward(
        *tensors, **_offsets(packing), dq=dq, dk=dk, dv=dv, softmax_scale=packing.scale,
        is_causal=packing.causal, deterministic=False,
    )  # fmt: skip


def _offsets(packing: Packing) -> dict[str, Tensor | int]:
    names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    return dict(zip(names, packing.offsets, strict=True))


KERNEL = Kernel(
    "flash_attn_3",
    _forward,
    _backward,
    native_gqa=("cuda",),
    fills_gradients=True,
    packed=PackedKernel(_packed_forward, _packed_backward),
    module="flash_attn_interface",
)
