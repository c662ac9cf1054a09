"""What an engine adds to a layer's forward and backward, and its update by number and size of tensors.

The layers here have one row and weights of a few numbers, so that what is timed is Python's hooks and
messages that are as good as empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

WIDTH = 16
LAYERS = (1, 3)
CHUNKS = (1, 9)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class _Chain(nn.Module):
    """Modules one after the other, as deep in one another as those of a language model."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


def _layer() -> nn.Module:
    """A decoder layer's tree: norm, attention with a norm of each head, norm, MLP."""
    attention = _Chain(*(_linear() for _ in range(3)), _Scale(), _Scale(), _linear())
    mlp = _Chain(_linear(), nn.Identity(), _linear(), _linear())
    return _Chain(_Scale(), attention, _Scale(), mlp)


def _linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH, bias=False)


@dataclass(frozen=True, slots=True)
class Form:
    """How a toy runs."""

    layers: int
    is_checkpointed: bool = False
    chunks: int = 0
    """How often the last module runs, each time checkpointed; 0 for once and not."""


class Toy(nn.Module):
    """Layers one after the other, with a module before and after them, as a language model has."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.layers = nn.ModuleList([_layer() for _ in range(form.layers)])
        self.first, self.last = _linear(), _linear()
        self.scale = _Scale()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.form.is_checkpointed else layer(x)
        x = self.scale(x)
        outs = [checkpoint(self.last, x, use_reentrant=False) for _ in range(self.form.chunks)]
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


@dataclass(frozen=True, slots=True)
class Engines:
    """Makes engines of one cell's kind for modules that are no language models."""

    cell: RunConfig
    groups: RankGroups
    device: torch.device

    def wrapped(self, module: nn.Module) -> Engine:
        engine: Callable[..., Engine] = ENGINES[self.cell.engine]
        return engine(module, [*getattr(module, "layers", ())], self.cell, self.groups, self.device)


def engine_cases(grid: Grid, engines: Engines) -> Iterator[Case]:
    """(layers,), checkpointed or not, and (chunks,) of a layer; (tensors, numbers of a rank) updates."""
    name, dtype = engines.cell.engine, engines.cell.dtype
    for table, size, form in forms():
        yield Case(f"{name}_{table}", dtype, (size,), partial(_hooks, engines, form))
    shards = SHARDS[name](engines.cell)
    for tensors in grid.tensors:
        for numbers in grid.tensor_numbers:
            if tensors * numbers <= grid.most_numbers:
                make = partial(_update, engines, tensors, numbers * shards)
                yield Case(f"{name}_update", dtype, (tensors, numbers), make)


def plain_cases(dtype: str, device: torch.device) -> Iterator[Case]:
    """The same layers without an engine: what of their time is their own."""
    for table, size, form in forms():
        if table == "layers":
            yield Case(f"plain_{table}", dtype, (size,), partial(_plain, dtype, device, form))


def forms() -> Iterator[tuple[str, int, Form]]:
    """Table, size and how the toy runs."""
    for layers in LAYERS:
        yield "layers", layers, Form(layers)
        yield "checkpointed_layers", layers, Form(layers, is_checkpointed=True)
    for chunks in CHUNKS:
        yield "chunks", chunks, Form(LAYERS[0], chunks=chunks)


def _hooks(engines: Engines, form: Form) -> Call:
    """Forward and backward of one micro-step, the last; nothing is updated."""
    engine = engines.wrapped(Toy(form))
    x = _row(engines.cell.dtype if engines.cell.engine == "zero3" else "fp32", engines.device)

    def run() -> None:
        with engine.micro_step(last=True):
            engine.backward(engine.module(x))

    return run


def _plain(dtype: str, device: torch.device, form: Form) -> Call:
    module = Toy(form).to(device, TORCH_DTYPES[dtype])
    x = _row(dtype, device)
    return lambda: module(x).backward()


def _update(engines: Engines, tensors: int, numbers: int) -> Prepared:
    """The update alone, of gradients from one backward."""
    engine = engines.wrapped(_Weights(tensors, numbers))
    x = _row(engines.cell.dtype if engines.cell.engine == "zero3" else "fp32", engines.device)

    def fill_gradients() -> None:
        with engine.micro_step(last=True):
            engine.backward(engine.module(x))

    return Prepared(engine.update, before=fill_gradients)


def _row(dtype: str, device: torch.device) -> Tensor:
    return torch.ones(1, WIDTH, device=device, dtype=TORCH_DTYPES[dtype], requires_grad=True)
