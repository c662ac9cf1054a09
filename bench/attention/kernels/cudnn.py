"""Kernel `cudnn`: the operators behind torch's `SDPBackend.CUDNN_ATTENTION`."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.attention.kernels.kernel import Gradients, Kernel


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q, k, v, attn_bias=None, compute_log_sumexp=True, dropout_p=0.0, is_causal=causal,
        return_debug_mask=False, scale=scale,
    )  # fmt: skip
    return out, lse.reshape(out.shape[:-1])


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    # The random state is not read without dropout.
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _with_strides_of(q, dout), q, k, v, _with_strides_of(q, out), lse.unsqueeze(-1),
        philox_seed=unused, philox_offset=unused, attn_bias=None, cum_seq_q=None, cum_seq_k=None,
        max_q=q.shape[2], max_k=k.shape[2], dropout_p=0.0, is_causal=causal, scale=scale,
    )  # fmt: skip
    return dq, dk, dv


def _with_strides_of(q: Tensor, x: Tensor) -> Tensor:
    """Return `x` with the strides of `empty_like(q)`, which the forward gives its output.

    torch caches cuDNN graphs by the shapes and strides of q, k and v only (`MHACacheKeyWrapper` in its
    MHA.cpp). A gradient or a merged output with other strides could therefore reach a graph that was built
    for these.
    """
    strides = torch.empty_like(q, device="meta").stride()
    return x if x.stride() == strides else torch.empty_like(q).copy_(x)


KERNEL = Kernel("cudnn", _forward, _backward, native_gqa=("cuda",))
