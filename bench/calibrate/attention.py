"""Kernel calls by the shape of their block, and what is done around them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from bench.attention.kernels import KERNELS, Kernel, kernel_backward, kernel_forward
from bench.attention.merge import Partial
from bench.calibrate.case import Call, Case
from bench.calibrate.grid import Grid
from bench.training.models import TORCH_DTYPES

HEADS = 2
"""Of what is done around a block."""
GROUPS = 2
"""Query heads of a KV head where K and V are repeated."""

Block = tuple[bool, int, int]
"""Whether it is causal, queries, keys."""


def block_cases(grid: Grid, kernel: str, dtype: str, device: torch.device) -> Iterator[Case]:
    """(head_dim, queries, keys), of causal squares without keys, forward and backward; times of one head."""
    for head_dim in grid.head_dims:
        for block in _blocks(grid):
            causal, *rows = block
            sizes = (head_dim, rows[0]) if causal else (head_dim, *rows)
            for direction in ("forward", "backward"):
                name = f"{kernel}_{'causal' if causal else 'full'}_{direction}"
                shape = grid.heads, head_dim, block
                make = partial(_block, KERNELS[kernel], direction, *shape, dtype, device)
                yield Case(name, dtype, sizes, make, parts=grid.heads)


def around_cases(grid: Grid, dtype: str, device: torch.device) -> Iterator[Case]:
    """(head_dim, rows): what strategies do with heads' rows beside the kernel."""
    for sizes in grid.sizes(grid.head_dims):
        for name, make in AROUND.items():
            yield Case(name, dtype, sizes, partial(make, *sizes, dtype, device))


def _blocks(grid: Grid) -> Iterator[Block]:
    for square in grid.squares:
        yield True, square, square
    for queries in grid.rectangles:
        for keys in (queries // 2, queries, 2 * queries):
            if keys <= grid.rectangles[-1]:
                yield False, queries, keys


def _block(
    kernel: Kernel, direction: str, heads: int, head_dim: int, block: Block, dtype: str, device: torch.device
) -> Call:
    causal, queries, keys = block
    q, k, v = (_heads(heads, rows, head_dim, dtype, device) for rows in (queries, keys, keys))
    forward = partial(kernel_forward, kernel, q, k, v, causal=causal, scale=head_dim**-0.5)
    if direction == "forward":
        return forward
    out, lse = forward()
    dout = torch.randn_like(out)
    return partial(kernel_backward, kernel, dout, q, k, v, out, lse, causal=causal, scale=head_dim**-0.5)


def _merge(head_dim: int, rows: int, dtype: str, device: torch.device) -> Call:
    """A block's output taken into a wide partial one."""
    out = _heads(HEADS, rows // HEADS, head_dim, dtype, device)
    lse = torch.randn(out.shape[:-1], device=device)
    partial_out = Partial.first(out, lse.clone())
    return lambda: partial_out.merge(slice(None), out, lse)


def _accumulate(head_dim: int, rows: int, dtype: str, device: torch.device) -> Call:
    """A block's gradient added to a wide one."""
    share = _heads(HEADS, rows // HEADS, head_dim, dtype, device)
    total = share.float()
    return lambda: total.add_(share)


def _pack(head_dim: int, rows: int, dtype: str, device: torch.device) -> Call:
    """A copy that puts heads in front of tokens."""
    source = _heads(HEADS, rows // HEADS, head_dim, dtype, device).transpose(1, 2)
    return source.contiguous


def _repeat(head_dim: int, rows: int, dtype: str, device: torch.device) -> Call:
    """KV heads repeated: rows of the result."""
    source = _heads(1, rows // GROUPS, head_dim, dtype, device)
    return lambda: source.repeat_interleave(GROUPS, dim=1)


def _repeat_backward(head_dim: int, rows: int, dtype: str, device: torch.device) -> Call:
    """Gradients of repeated KV heads summed: rows of those."""
    source = _heads(GROUPS, rows // GROUPS, head_dim, dtype, device)
    return lambda: source.unflatten(1, (-1, GROUPS)).sum(dim=2)


AROUND = {
    "merge": _merge,
    "accumulate": _accumulate,
    "pack": _pack,
    "repeat": _repeat,
    "repeat_backward": _repeat_backward,
}


def _heads(heads: int, rows: int, head_dim: int, dtype: str, device: torch.device) -> Tensor:
    return torch.randn(1, heads, rows, head_dim, device=device).to(TORCH_DTYPES[dtype])
