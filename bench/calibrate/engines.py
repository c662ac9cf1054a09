"""What an engine adds to a layer's forward and backward, and its update by number and size of tensors.

The layers here have one row and the smallest weights that ZeRO-3 shards, so that what is timed is Python's
hooks and short messages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.calibrate.case import Call, Case, Prepared
from bench.calibrate.grid import Grid
from bench.config import RunConfig
from bench.cost.operations import SHARDS
from bench.ranks.groups import RankGroups
from bench.training.engines import ENGINES, Engine
from bench.training.models import TORCH_DTYPES

WIDTH = 320
"""Columns of the smallest square weights, in tens, that ZeRO-3 shards: it keeps 100,000 numbers whole."""
LAYERS = (1, 3)
CHUNKS = (1, 9)

Wrapped = Callable[[nn.Module], tuple[Engine, Call]]
"""A module in an engine, and what runs its last micro-step."""


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def _layer() -> nn.Module:
    """A decoder layer's tree: norm, attention with a norm of each head, norm, MLP."""
    attention = nn.Sequential(*(_linear() for _ in range(3)), _Scale(), _Scale(), _linear())
    mlp = nn.Sequential(_linear(), nn.Identity(), _linear(), _linear())
    return nn.Sequential(_Scale(), attention, _Scale(), mlp)


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


class Toy(nn.Module):
    """Layers one after the other, with a module before and after them, as a language model has.

    `chunks` is how often the last module runs, each time checkpointed; 0 for once and not.
    """

    def __init__(self, layers: int, *, is_checkpointed: bool = False, chunks: int = 0) -> None:
        super().__init__()
        self.is_checkpointed, self.chunks = is_checkpointed, chunks
        self.layers = nn.ModuleList([_layer() for _ in range(layers)])
        self.first, self.last = _linear(), _linear()
        self.scale = _Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.is_checkpointed else layer(x)
        x = self.scale(x)
        outs = [checkpoint(self.last, x, use_reentrant=False) for _ in range(self.chunks)]
        return torch.stack([out.float().sum() for out in outs or [self.last(x)]]).sum()


class _Weights(nn.Module):
    """So many tensors of so many numbers."""

    def __init__(self, tensors: int, numbers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.weights = nn.ParameterList([torch.randn(numbers) / numbers for _ in range(tensors)])

    def forward(self, x: Tensor) -> Tensor:
        used: Tensor = sum(((weight * x.mean()).float().sum() for weight in self.weights), x.float().sum())
        return used


def engine_cases(grid: Grid, cell: RunConfig, groups: RankGroups, device: torch.device) -> Iterator[Case]:
    """(layers,), checkpointed or not, and (chunks,) of a layer; (tensors, numbers of a rank) of an update."""
    wrapped = partial(_wrapped, cell, groups, device)
    toys = [("layers", layers, partial(Toy, layers)) for layers in LAYERS]
    toys += [("checkpointed_layers", layers, partial(Toy, layers, is_checkpointed=True)) for layers in LAYERS]
    toys += [("chunks", chunks, partial(Toy, LAYERS[0], chunks=chunks)) for chunks in CHUNKS]
    for table, size, toy in toys:
        yield Case(f"{cell.engine.name}_{table}", cell.dtype, (size,), partial(_hooks, wrapped, toy))
    shards = SHARDS[cell.engine.name](cell)
    for tensors in grid.tensors:
        for numbers in grid.tensor_numbers:
            if tensors * numbers <= grid.most_numbers:
                update = partial(_update, wrapped, tensors, numbers * shards)
                yield Case(f"{cell.engine.name}_update", cell.dtype, (tensors, numbers), update)


def plain_cases(dtype: str, device: torch.device) -> Iterator[Case]:
    """The same layers without an engine: what of their time is their own."""
    for layers in LAYERS:
        yield Case("plain_layers", dtype, (layers,), partial(_plain, layers, dtype, device))


def _hooks(wrapped: Wrapped, toy: Callable[[], nn.Module]) -> Call:
    """Forward and backward of one micro-step, the last; nothing is updated."""
    _, micro_step = wrapped(toy())
    return micro_step


def _update(wrapped: Wrapped, tensors: int, numbers: int) -> Prepared:
    """The update alone, of gradients from one backward."""
    engine, fill_gradients = wrapped(_Weights(tensors, numbers))
    return Prepared(engine.update, before=fill_gradients)


def _wrapped(
    cell: RunConfig, groups: RankGroups, device: torch.device, module: nn.Module
) -> tuple[Engine, Call]:
    """The cell's engine around a module that is no language model, and its last micro-step."""
    make: Callable[..., Engine] = ENGINES[cell.engine.name]
    engine = make(module, [*getattr(module, "layers", ())], cell, groups, device)
    x = _row(cell.dtype if cell.engine.name == "zero3" else "fp32", device)

    def micro_step() -> None:
        with engine.micro_step(last=True):
            engine.backward(engine.module(x))

    return engine, micro_step


def _plain(layers: int, dtype: str, device: torch.device) -> Call:
    module = Toy(layers).to(device, TORCH_DTYPES[dtype])
    x = _row(dtype, device)
    return lambda: module(x).backward()


def _row(dtype: str, device: torch.device) -> Tensor:
    return torch.ones(1, WIDTH, device=device, dtype=TORCH_DTYPES[dtype], requires_grad=True)
