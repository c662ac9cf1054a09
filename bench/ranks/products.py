"""Matrix products of 16-bit numbers in float32, for CPU ranks without 16-bit instructions.

With AVX2 and two threads, a product of 16,384 x 64 and 64 x 192 numbers takes 78 ms with torch's bf16
operator and 5 ms in float32. Only `mm` and `addmm` are overridden: linear layers, their gradients and the
loss call them. The longest of the three dimensions of a product is processed in blocks, so that float32
copies stay small.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.library import Library

from bench.common.cpu_arithmetic import cpu_arithmetic

BLOCK_NUMBERS = 2**18
"""Largest number of elements in a float32 copy of an operand. Smaller blocks would mean more calls of
operators, each of which a profiler makes slower."""


def use_wide_products() -> Library | None:
    """Make `mm` and `addmm` of this process's CPU compute 16-bit products in float32.

    The override lasts as long as the returned library is referenced. If the CPU has bf16 instructions,
    nothing is overridden and the result is None.
    """
    if cpu_arithmetic(torch.bfloat16) == torch.bfloat16:
        return None
    library = Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that its operators are overridden
        library.impl("mm", _mm, "CPU")
        library.impl("addmm", _addmm, "CPU")
    return library


def _mm(a: Tensor, b: Tensor) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    if cpu_arithmetic(a.dtype) == a.dtype:
        return torch.mm(a, b, out=out)
    return _float32_product(a, b, out.zero_(), beta=0, alpha=1, out=out)


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    out = a.new_empty(a.shape[0], b.shape[1])
    if cpu_arithmetic(a.dtype) == a.dtype:
        return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=out)
    return _float32_product(a, b, bias.expand_as(out), beta=beta, alpha=alpha, out=out)


def _float32_product(a: Tensor, b: Tensor, bias: Tensor, *, beta: float, alpha: float, out: Tensor) -> Tensor:
    """Compute `out = beta * bias + alpha * a @ b` in float32, and return `out`."""
    rows, inner = a.shape
    if b.shape[1] > max(rows, inner):
        return _float32_product(b.t(), a.t(), bias.t(), beta=beta, alpha=alpha, out=out.t()).t()
    if inner > rows:
        total = bias.float() * beta
        for block in _blocks(inner, max(rows, b.shape[1])):
            torch.addmm(total, a[:, block].float(), b[block].float(), alpha=alpha, out=total)
        return out.copy_(total)
    right = b.float()
    for block in _blocks(rows, max(inner, b.shape[1])):
        left, total = a[block].float(), bias[block].float()
        out[block] = torch.addmm(total, left, right, beta=beta, alpha=alpha, out=torch.empty_like(total))
    return out


def _blocks(length: int, width: int) -> Iterator[slice]:
    size = max(1, BLOCK_NUMBERS // max(1, width))
    return (slice(start, start + size) for start in range(0, length, size))
