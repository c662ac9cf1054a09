"""Kernel `flash_blocks`: torch's flash kernel on one block of keys after another, merged as in a ring.

No rank sends anything. The difference from `torch_flash` is therefore only the rounding of the merge
(arXiv:2310.01889, section 3), which runs in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.attention.kernels import torch_flash
from bench.attention.kernels.kernel import Gradients, Kernel
from bench.attention.layouts import Tile
from bench.attention.merge import Partial

BLOCKS = 4
"""Number of blocks that the keys are cut into."""


def _tiles(queries: int, keys: int, causal: bool) -> Iterator[Tile]:
    size = -(-keys // BLOCKS)
    for start in range(0, keys, size):
        block = slice(start, min(start + size, keys))
        if not causal:
            yield Tile(slice(0, queries), block, causal=False)
            continue
        yield Tile(block, block, causal=True)
        if block.stop < queries:
            yield Tile(slice(block.stop, queries), block, causal=False)


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    partial = Partial.empty(q)
    for tile in _tiles(q.shape[2], k.shape[2], causal):
        tensors = (q[:, :, tile.queries], k[:, :, tile.keys], v[:, :, tile.keys])
        partial.merge(tile.queries, *torch_flash.KERNEL.forward(*tensors, tile.causal, scale))
    return partial.out.to(q.dtype), partial.lse


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    sum_dtype = torch.promote_types(q.dtype, torch.float32)
    dq, dk, dv = (torch.zeros_like(x, dtype=sum_dtype) for x in (q, k, v))
    for tile in _tiles(q.shape[2], k.shape[2], causal):
        rows, keys = tile.queries, tile.keys
        tile_dout, tile_q, tile_out, tile_lse = (x[:, :, rows] for x in (dout, q, out, lse))
        block_k, block_v, tile_lse = k[:, :, keys], v[:, :, keys], tile_lse.contiguous()
        grads = torch_flash.KERNEL.backward(
            tile_dout, tile_q, block_k, block_v, tile_out, tile_lse, tile.causal, scale
        )
        dq[:, :, rows] += grads[0]
        dk[:, :, keys] += grads[1]
        dv[:, :, keys] += grads[2]
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


KERNEL = Kernel("flash_blocks", _forward, _backward, native_gqa=torch_flash.KERNEL.native_gqa)
