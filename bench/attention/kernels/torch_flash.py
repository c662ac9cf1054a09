"""FlashAttention as torch ships it: one operator for the CPU, others for CUDA.

Those for CUDA are FlashAttention-2: `mha_fwd`, `mha_bwd` and their varlen forms in torch's flash_api.cpp ask
that the number of query heads is a multiple of that of KV heads, and sum gradients over groups themselves, in
the inputs' dtype. The one for the CPU asks for equal numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.attention.kernels.kernel import Kernel, PackedKernel
from bench.attention.kernels.packing import Packing


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type == "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
    else:
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    if q.device.type == "cpu":
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        # Without packing the offsets are not read.
        grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *_no_dropout(q),
            scale=scale,
        )  # fmt: skip
    return grads[0], grads[1], grads[2]


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    out_TND, lse_NT, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *_offsets(packing), 0.0, packing.causal, False, scale=packing.scale
    )
    return out_TND, lse_NT


def _packed_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, packing: Packing
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        dout, q, k, v, out, lse.contiguous(), *_offsets(packing), 0.0, packing.causal, *_no_dropout(q),
        scale=packing.scale,
    )  # fmt: skip
    return dq, dk, dv


def _offsets(packing: Packing) -> tuple[Tensor, Tensor, int, int]:
    return packing.cu_seqlens_q, packing.cu_seqlens_k, packing.max_seqlen_q, packing.max_seqlen_k


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """A random state that is never read."""
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    return unused, unused


KERNEL = Kernel(
    "torch_flash",
    _forward,
    _backward,
    native_gqa=("cuda",),
    packed=PackedKernel(("cuda",), _packed_forward, _packed_backward),
)
