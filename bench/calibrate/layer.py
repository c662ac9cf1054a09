"""What a decoder layer does beside products and attention, as transformers runs it, through autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, rotate_half

from bench.calibrate.case import Call, Case
from bench.calibrate.grid import Grid
from bench.training.embedding import WideSumEmbedding
from bench.training.models import TORCH_DTYPES

ROTATED_HEADS = 4

Function = Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Built:
    """A differentiable function of inputs that are there already."""

    run: Function
    inputs: tuple[Tensor, ...]


Build = Callable[[int, int, torch.dtype, torch.device], Built]
"""(rows, columns, dtype, device) -> the function on a tensor of that size."""


def forward_cases(grid: Grid, dtype: str, device: torch.device) -> Iterator[Case]:
    """(columns, rows) of rotary angles, which have no backward."""
    for columns in grid.head_dims:
        for rows in grid.tokens:
            if rows * columns <= grid.most_numbers:
                yield Case("angles", dtype, (columns, rows), partial(_angles, rows, columns, dtype, device))


def fresh_cases(grid: Grid, device: torch.device) -> Iterator[Case]:
    """(bytes,) of memory that is written for the first time, beyond what writing it again takes.

    On a CPU the C library gives back what a step frees, and the kernel hands it out again page by page.
    """
    if device.type == "cpu":
        for name, make in (("fresh_memory", _fresh), ("used_memory", _used)):
            yield Case(name, "any", (grid.fresh_bytes,), partial(make, grid.fresh_bytes))


def elementwise_cases(grid: Grid, dtype: str, device: torch.device) -> Iterator[Case]:
    """(columns, rows) of each kind, forward and backward."""
    for kind, (columns_of, build) in KINDS.items():
        for columns in columns_of(grid):
            for rows in grid.tokens:
                if rows * columns <= grid.most_numbers:
                    made = partial(build, rows, columns, TORCH_DTYPES[dtype], device)
                    yield Case(kind, dtype, (columns, rows), partial(_forward, made))
                    yield Case(f"{kind}_backward", dtype, (columns, rows), partial(_backward, made))


def _forward(make: Callable[[], Built]) -> Call:
    return make().run


def _backward(make: Callable[[], Built]) -> Call:
    built = make()
    out = built.run()
    gradient = torch.randn_like(out)
    return lambda: torch.autograd.grad(out, built.inputs, gradient, retain_graph=True)


def _angles(rows: int, columns: int, dtype: str, device: torch.device) -> Call:
    positions = torch.arange(rows, device=device)[:, None]
    frequencies = torch.randn(columns // 2, device=device)

    def run() -> tuple[Tensor, ...]:
        turns = positions.float() * frequencies
        both = torch.cat([turns, turns], dim=-1)
        return tuple(each.to(TORCH_DTYPES[dtype]) for each in (both.cos(), both.sin()))

    return run


def _fresh(size: int) -> Call:
    return lambda: torch.empty(size, dtype=torch.uint8).fill_(1)


def _used(size: int) -> Call:
    kept = torch.empty(size, dtype=torch.uint8)
    return lambda: kept.fill_(1)


def _norm(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    norm = Qwen3RMSNorm(columns).to(device, dtype)
    x = _random(rows, columns, dtype, device)
    return Built(lambda: norm(x), (x, norm.weight))


def _rotary(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    """Rows are those of all heads; the heads of a token lie side by side, as projections leave them."""
    tokens = rows // ROTATED_HEADS
    heads = torch.randn(1, tokens, ROTATED_HEADS, columns, device=device).to(dtype).requires_grad_()
    cos, sin = (torch.randn(1, 1, tokens, columns, device=device).to(dtype) for _ in range(2))
    x = heads.transpose(1, 2)
    return Built(lambda: (x * cos) + (rotate_half(x) * sin), (x,))


def _activation(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    gate, up = (_random(rows, columns, dtype, device) for _ in range(2))
    return Built(lambda: silu(gate) * up, (gate, up))


def _sum(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    x, y = (_random(rows, columns, dtype, device) for _ in range(2))
    return Built(lambda: x + y, (x, y))


def _cast(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    """To the other of the two precisions, as autocast does with a projection's input."""
    x = _random(rows, columns, dtype, device)
    other = torch.bfloat16 if dtype == torch.float32 else torch.float32
    return Built(lambda: x.to(other), (x,))


def _embedding(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    table = WideSumEmbedding(VOCABULARY, columns).to(device, dtype)
    ids = torch.randint(0, VOCABULARY, (1, rows), device=device)
    return Built(lambda: table(ids), (table.weight,))


def _token_loss(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Built:
    logits = _random(rows, columns, dtype, device)
    labels = torch.randint(0, columns, (rows,), device=device)
    return Built(lambda: cross_entropy(logits.float(), labels, reduction="sum"), (logits,))


VOCABULARY = 256
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
    return torch.randn(rows, columns, device=device).to(dtype).requires_grad_()
