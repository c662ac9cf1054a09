"""cuDNN's attention operators of torch, on the CPU, by the formula."""

import torch

from bench.attention.kernels import KERNELS, kernel_backward, kernel_forward


def register_operators():
    """Register the operators. The library that is returned holds the registration."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", _forward, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", _backward, "CPU")
    return library


def attend(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
):
    """Return the output that torch's `scaled_dot_product_attention` has if it takes cuDNN."""
    assert (attn_mask, dropout_p) == (None, 0.0)
    qkv = query, key, value
    if torch.is_autocast_enabled("cpu"):
        qkv = (x.to(torch.get_autocast_dtype("cpu")) for x in qkv)
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    return operator(*qkv, None, True, 0.0, is_causal, scale=scale)[0]


def _forward(q, k, v, bias, with_lse, dropout=0.0, causal=False, debug=False, *, scale=None):
    """Return the outputs of cuDNN's operator, whose LSE has a last dimension of 1."""
    out, lse = kernel_forward(KERNELS["math"], q, k, v, causal=causal, scale=scale)
    none = torch.empty(0)
    return out, lse.unsqueeze(-1), none, none, q.shape[2], k.shape[2], none, none, none


def _backward(
    dout, q, k, v, out, lse, seed, offset, bias, ends_q, ends_k, longest_q, longest_k, dropout, causal, *,
    scale=None,
):  # fmt: skip
    assert lse.shape == (*out.shape[:-1], 1)
    return kernel_backward(KERNELS["math"], dout, q, k, v, out, lse.squeeze(-1), causal=causal, scale=scale)
