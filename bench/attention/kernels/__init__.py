"""Kernels: attention on one device, one module for each kernel. May import what lies below attention.

A new kernel is a module here, an entry in `KERNELS` and an entry in `KERNEL_FACTS` of
`bench.attention.kernel_facts`, which needs no torch.

Shapes: B batch, N query heads, K KV heads, S query tokens, T key tokens, D head size. The LSE is the natural
log of the sum of exponentials of the scaled scores, [B, N, S], in float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.attention.kernels import (
    cudnn,
    flash_attn_2,
    flash_attn_3,
    flash_attn_4,
    flash_blocks,
    math,
    torch_flash,
)
from bench.attention.kernels.kernel import (
    Kernel,
    Packing,
    attend,
    attend_with_lse,
    kernel_backward,
    kernel_backward_into,
    kernel_forward,
)

__all__ = [
    "KERNELS", "Kernel", "Packing", "attend", "attend_with_lse", "kernel_backward", "kernel_backward_into",
    "kernel_forward",
]  # fmt: skip

KERNELS: Mapping[str, Kernel] = {
    module.KERNEL.name: module.KERNEL
    for module in (torch_flash, math, flash_blocks, cudnn, flash_attn_2, flash_attn_3, flash_attn_4)
}
"""Kernels by name."""
