"""Kernel `torch_flash`: the flash attention operators that torch ships, for CUDA and for CPUs.

The CUDA operators are FlashAttention-2 (`mha_fwd`, `mha_bwd` and their varlen forms in torch's
flash_api.cpp). They take any number of query heads that is a multiple of the KV heads, and sum the gradients
of a group in the inputs' dtype. The CPU operator needs as many KV heads as query heads.

On a CPU without 16-bit instructions, forward and backward of 8,192 tokens and 4 heads of size 16 take 3.3 s
in bf16 and 0.9 s in float32 (one thread, AVX2). On such a CPU this kernel therefore computes in float32, in
which GPU kernels accumulate as well, and rounds the results once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from bench.attention.kernels.kernel import Gradients, Kernel, PackedKernel, Packing
from bench.common.cpu_arithmetic import cpu_arithmetic


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    if q.device.type != "cpu":
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
        return out, lse
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    compute_dtype = cpu_arithmetic(q.dtype)
    if compute_dtype == q.dtype:
        out, lse = operator(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=compute_dtype)
    for heads in _heads_at_once(q):
        tensors = (x[:, heads].to(compute_dtype) for x in (q, k, v))
        out[:, heads], lse[:, heads] = operator(*tensors, 0.0, causal, scale=scale)
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    if q.device.type != "cpu":
        # The two offsets (None) are read for packed sequences only.
        dq, dk, dv, *_ = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *_no_dropout(q),
            scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    compute_dtype = cpu_arithmetic(q.dtype)
    if compute_dtype == q.dtype:
        dq, dk, dv = operator(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
        return dq, dk, dv
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for heads in _heads_at_once(q):
        tensors = (x[:, heads].to(compute_dtype) for x in (dout, q, k, v, out, lse))
        _write([x[:, heads] for x in gradients], operator(*tensors, 0.0, causal, scale=scale))
    return gradients


def _write(into: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """Copy each part to its target.

    This is a function so that the float32 parts are freed before those of the next heads are allocated.
    """
    for target, part in zip(into, parts, strict=True):
        target.copy_(part)


def _heads_at_once(q: Tensor) -> Iterator[slice]:
    """Return slices of the heads, each with as many heads as torch has threads.

    The CPU's backward divides heads among threads. More heads at a time would only take more memory.
    """
    threads = torch.get_num_threads()
    return (slice(start, start + threads) for start in range(0, q.shape[1], threads))


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    out_TND, lse_NT, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *packing.offsets, 0.0, packing.causal, False, scale=packing.scale
    )
    return out_TND, lse_NT


def _packed_backward(into: Gradients, tensors: tuple[Tensor, ...], packing: Packing) -> None:
    """Compute the gradients and copy them to `into`, as torch's operator always allocates its results."""
    gradients = torch.ops.aten._flash_attention_backward(
        *tensors, *packing.offsets, 0.0, packing.causal, *_no_dropout(tensors[0]),
        scale=packing.scale,
    )  # fmt: skip
    _write(into, gradients)


def _no_dropout(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return a random state, which the operators do not read without dropout."""
    unused = torch.empty((), dtype=torch.uint64, device=q.device)
    return unused, unused


KERNEL = Kernel(
    "torch_flash",
    _forward,
    _backward,
    native_gqa=("cuda",),
    packed=PackedKernel(_packed_forward, _packed_backward),
)
