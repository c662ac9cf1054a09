"""torch's flash kernel on one block of keys after another, merged in wide precision: what a ring computes.

There is no ring and nothing is sent, so that its distance from `torch_flash` is the rounding of the merge
alone (arXiv:2310.01889, section 3).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.attention.kernels import torch_flash
from bench.attention.kernels.kernel import Gradients, Kernel
from bench.attention.merge import Partial

BLOCKS = 4

Block = tuple[slice, slice, bool]
"""Queries, the keys that all of them see, and whether they see earlier ones of these keys only."""


def _blocks(queries: int, keys: int, causal: bool) -> Iterator[Block]:
    size = -(-keys // BLOCKS)
    for start in range(0, keys, size):
        seen = slice(start, min(start + size, keys))
        if not causal:
            yield slice(0, queries), seen, False
            continue
        yield seen, seen, True
        if seen.stop < queries:
            yield slice(seen.stop, queries), seen, False


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    partial = Partial.nothing(q)
    for rows, keys, is_causal in _blocks(q.shape[2], k.shape[2], causal):
        tensors = (q[:, :, rows], k[:, :, keys], v[:, :, keys])
        partial.merge(rows, *torch_flash.KERNEL.forward(*tensors, is_causal, scale))
    return partial.out.to(q.dtype), partial.lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    wide = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
    for rows, keys, is_causal in _blocks(q.shape[2], k.shape[2], causal):
        own = [x[:, :, rows] for x in (dout, q, out, lse)]
        grads = torch_flash.KERNEL.backward(
            own[0], own[1], k[:, :, keys], v[:, :, keys], own[2], own[3].contiguous(), is_causal, scale
        )
        dq[:, :, rows] += grads[0]
        dk[:, :, keys] += grads[1]
        dv[:, :, keys] += grads[2]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


KERNEL = Kernel("flash_blocks", _forward, _backward, native_gqa=torch_flash.KERNEL.native_gqa)
