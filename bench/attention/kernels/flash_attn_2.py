"""Kernel `flash_attn_2`: the package flash-attn, called through the same functions as in ring-flash-attn."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.attention.kernels.kernel import Gradients, Kernel, PackedKernel, Packing


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_forward

    q_BSND, k_BTKD, v_BTKD = (x.transpose(1, 2) for x in (q, k, v))
    out_BSND, lse_BNS, *_ = _flash_attn_forward(
        q_BSND, k_BTKD, v_BTKD, dropout_p=0.0, softmax_scale=scale, causal=causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    return out_BSND.transpose(1, 2), lse_BNS


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    from flash_attn.flash_attn_interface import _flash_attn_backward

    # flash-attn takes any strides as long as the numbers of each head are contiguous.
    tensors = [x.transpose(1, 2) for x in (dout, q, k, v, out)]
    grads = [torch.empty_like(x) for x in tensors[1:4]]
    _flash_attn_backward(
        *tensors, lse, *grads, dropout_p=0.0, softmax_scale=scale, causal=causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip
    return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_forward

    out_TND, lse_NT, *_ = _flash_attn_varlen_forward(
        q, k, v, *packing.offsets, dropout_p=0.0, softmax_scale=packing.scale, causal=packing.causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
    )  # fmt: skip
    return out_TND, lse_NT


def _packed_backward(into: Gradients, tensors: tuple[Tensor, ...], packing: Packing) -> None:
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    _flash_attn_varlen_backward(
        *tensors, *into, *packing.offsets, dropout_p=0.0, softmax_scale=packing.scale, causal=packing.causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, deterministic=False,
    )  # fmt: skip


KERNEL = Kernel(
    "flash_attn_2",
    _forward,
    _backward,
    native_gqa=("cuda",),
    packed=PackedKernel(_packed_forward, _packed_backward),
    module="flash_attn.flash_attn_interface",
)
