"""What a decoder layer does beside attention, as transformers runs it: products, and all else by autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, silu
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, rotate_half

from bench.calibrate.case import Call, Case
from bench.calibrate.grid import Grid
from bench.training.embedding import WideSumEmbedding
from bench.training.models import TORCH_DTYPES

ROTATED_HEADS = 4
VOCABULARY = 256

Built = tuple[Callable[[], Tensor], tuple[Tensor, ...]]
"""A differentiable function, and its inputs, which are there already."""
Build = Callable[[int, int, torch.dtype, torch.device], Built]
"""(rows, columns, dtype, device) -> the function on a tensor of that size."""


def layer_cases(grid: Grid, dtype: str, device: torch.device) -> Iterator[Case]:
    """Products by their three sizes; (columns, rows) of each other kind, forward and backward."""
    yield from _products(grid, dtype, device)
    for kind, (columns_of, build) in KINDS.items():
        for columns, rows in grid.sizes(columns_of(grid)):
            made = partial(build, rows, columns, TORCH_DTYPES[dtype], device)
            yield Case(kind, dtype, (columns, rows), partial(_forward, made))
            yield Case(f"{kind}_backward", dtype, (columns, rows), partial(_backward, made))
    for columns, rows in grid.sizes(grid.head_dims):
        yield Case("angles", dtype, (columns, rows), partial(_angles, rows, columns, dtype, device))


def memory_cases(grid: Grid, device: torch.device) -> Iterator[Case]:
    """(bytes,) of memory that is written for the first time, and of memory that is written again.

    On a CPU the C library gives back what a step frees, and the kernel hands it out again page by page.
    """
    if device.type == "cpu":
        size = grid.fresh_bytes
        yield Case("fresh_memory", "any", (size,), lambda: lambda: _bytes(size).fill_(1))
        yield Case("used_memory", "any", (size,), lambda: partial(_bytes(size).fill_, 1))


def _bytes(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _products(grid: Grid, dtype: str, device: torch.device) -> Iterator[Case]:
    """[rows, inner] times a weight [columns, inner], and both gradients with their own sizes."""
    for rows in grid.rows:
        for columns in grid.widths:
            for inner in grid.widths:
                if rows * columns * inner <= grid.most_product:
                    make = partial(_product, rows, columns, inner, dtype, device)
                    yield Case("product", dtype, (rows, columns, inner), make)
                    make = partial(_input_gradient, rows, inner, columns, dtype, device)
                    yield Case("product_input", dtype, (rows, columns, inner), make)
                    make = partial(_weight_gradient, columns, inner, rows, dtype, device)
                    yield Case("product_weight", dtype, (columns, inner, rows), make)


def _product(rows: int, columns: int, inner: int, dtype: str, device: torch.device) -> Call:
    x, weight = _plain(rows, inner, dtype, device), _plain(columns, inner, dtype, device)
    return lambda: linear(x, weight)


def _input_gradient(rows: int, inner: int, columns: int, dtype: str, device: torch.device) -> Call:
    """[rows, inner] times the weight [inner, columns] as it is stored."""
    gradient, weight = _plain(rows, inner, dtype, device), _plain(inner, columns, dtype, device)
    return lambda: gradient.matmul(weight)


def _weight_gradient(rows: int, columns: int, inner: int, dtype: str, device: torch.device) -> Call:
    """[rows, inner] times [inner, columns]: both stored with `inner`, the tokens, in front."""
    gradient, x = _plain(inner, rows, dtype, device), _plain(inner, columns, dtype, device)
    return lambda: gradient.t().matmul(x)


def _forward(make: Callable[[], Built]) -> Call:
    return make()[0]


def _backward(make: Callable[[], Built]) -> Call:
    run, inputs = make()
    out = run()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, inputs, gradient, retain_graph=True)


def _angles(rows: int, columns: int, dtype: str, device: torch.device) -> Call:
    """Rotary angles, which have no backward."""
    positions = torch.arange(rows, device=device)[:, None]
    frequencies = torch.randn(columns // 2, device=device)

    def run() -> tuple[Tensor, ...]:
        turns = positions.float() * frequencies
        both = torch.cat([turns, turns], dim=-1)
        return tuple(each.to(TORCH_DTYPES[dtype]) for each in (both.cos(), both.sin()))

    return run


def _norm(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    norm = Qwen3RMSNorm(columns).to(device, dtype)
    x = _random(rows, columns, dtype, device)
    return (lambda: norm(x), (x, norm.weight))


def _rotary(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    """Rows are those of all heads; the heads of a token lie side by side, as projections leave them."""
    tokens = rows // ROTATED_HEADS
    heads = torch.randn(1, tokens, ROTATED_HEADS, columns, device=device).to(dtype).requires_grad_()
    cos, sin = (torch.randn(1, 1, tokens, columns, device=device).to(dtype) for _ in range(2))
    x = heads.transpose(1, 2)
    return (lambda: (x * cos) + (rotate_half(x) * sin), (x,))


def _activation(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    gate, up = (_random(rows, columns, dtype, device) for _ in range(2))
    return (lambda: silu(gate) * up, (gate, up))


def _sum(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    x, y = (_random(rows, columns, dtype, device) for _ in range(2))
    return (lambda: x + y, (x, y))


def _cast(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    """To the other of the two precisions, as autocast does with a projection's input."""
    x = _random(rows, columns, dtype, device)
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    return (lambda: x.to(other), (x,))


def _embedding(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    table = WideSumEmbedding(VOCABULARY, columns).to(device, dtype)
    ids = torch.randint(0, VOCABULARY, (1, rows), device=device)
    return (lambda: table(ids), (table.weight,))


def _token_loss(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    logits = _random(rows, columns, dtype, device)
    labels = torch.randint(0, columns, (rows,), device=device)
    return (lambda: cross_entropy(logits.float(), labels, reduction="sum"), (logits,))


KINDS: Mapping[str, tuple[Callable[[Grid], tuple[int, ...]], Build]] = {
    "norm": (lambda grid: tuple(sorted({*grid.hidden, *grid.head_dims})), _norm),
    "rotary": (lambda grid: grid.head_dims, _rotary),
    "activation": (lambda grid: grid.hidden, _activation),
    "sum": (lambda grid: grid.hidden, _sum),
    "cast": (lambda grid: grid.hidden, _cast),
    "embedding": (lambda grid: grid.hidden, _embedding),
    "token_loss": (lambda grid: grid.vocabularies, _token_loss),
}


def _random(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A differentiable input."""
    return torch.randn(rows, columns, device=device).to(dtype).requires_grad_()


def _plain(rows: int, columns: int, dtype: str, device: torch.device) -> Tensor:
    return torch.randn(rows, columns, device=device).to(TORCH_DTYPES[dtype])
