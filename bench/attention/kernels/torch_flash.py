"""FlashAttention as torch ships it: one operator for the CPU, others for CUDA.

Those for CUDA are FlashAttention-2: `mha_fwd`, `mha_bwd` and their varlen forms in torch's flash_api.cpp ask
that the number of query heads is a multiple of that of KV heads, and sum gradients over groups themselves, in
the inputs' dtype. The one for the CPU asks for equal numbers. On a CPU without 16-bit instructions it takes
3.3 s in bf16, forward and backward, and 0.9 s in float32 (8,192 tokens, 4 heads of 16, one thread, AVX2):
there it computes in float32, as GPU kernels accumulate, and rounds results once.
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
    wide = cpu_arithmetic(q.dtype)
    if wide == q.dtype:
        out, lse = operator(q, k, v, 0.0, causal, scale=scale)
        return out, lse
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=wide)
    for heads in _heads_at_once(q):
        tensors = (x[:, heads].to(wide) for x in (q, k, v))
        out[:, heads], lse[:, heads] = operator(*tensors, 0.0, causal, scale=scale)
    return out, lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    if q.device.type != "cpu":
        # Without packing the offsets are not read.
        dq, dk, dv, *_ = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *_no_dropout(q),
            scale=scale,
        )  # fmt: skip
        return dq, dk, dv
    operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    wide = cpu_arithmetic(q.dtype)
    if wide == q.dtype:
        dq, dk, dv = operator(dout, q, k, v, out, lse, 0.0, causal, scale=scale)
        return dq, dk, dv
    gradients = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    for heads in _heads_at_once(q):
        tensors = (x[:, heads].to(wide) for x in (dout, q, k, v, out, lse))
        _write([x[:, heads] for x in gradients], operator(*tensors, 0.0, causal, scale=scale))
    return gradients


def _write(into: Sequence[Tensor], parts: Sequence[Tensor]) -> None:
    """A function of its own, so that wide parts are gone before the next heads' are made."""
    for given, part in zip(into, parts, strict=True):
        given.copy_(part)


def _heads_at_once(q: Tensor) -> Iterator[slice]:
    """A head for each thread: the CPU's backward shares out heads, and fewer take less memory."""
    threads = torch.get_num_threads()
    return (slice(start, start + threads) for start in range(0, q.shape[1], threads))


def _packed_forward(q: Tensor, k: Tensor, v: Tensor, packing: Packing) -> tuple[Tensor, Tensor]:
    out_TND, lse_NT, *_ = torch.ops.aten._flash_attention_forward(
        q, k, v, *packing.offsets, 0.0, packing.causal, False, scale=packing.scale
    )
    return out_TND, lse_NT


def _packed_backward(into: Gradients, tensors: tuple[Tensor, ...], packing: Packing) -> None:
    """Copied: torch's operator allocates its gradients and takes no others."""
    gradients = torch.ops.aten._flash_attention_backward(
        *tensors, *packing.offsets, 0.0, packing.causal, *_no_dropout(tensors[0]),
        scale=packing.scale,
    )  # fmt: skip
    _write(into, gradients)


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
