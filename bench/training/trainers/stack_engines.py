"""What a stack has made of the model, as the passes look at an engine; names are the native loop's."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from bench.config import RunConfig
from bench.ranks.groups import RankGroups
from bench.training.engines import DDP, FSDP2, Engine, Zero3, keep_own_share
from bench.training.optimizer import Updater


class StackEngine(Engine):
    """An engine that a stack builds; `attach` tells what it has built."""

    prefix = "model"
    """In the native loop the model is a part of the module that computes the loss."""

    def __init__(self, cell: RunConfig, groups: RankGroups) -> None:
        self.cell, self.groups = cell, groups

    def placed(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> Any:  # noqa: ARG002
        """The model for the stack, each of `layers` with its numbers when it is taken.

        In host memory, layer by layer: FSDP2 takes each to the GPU when it shards it.
        """
        for layer in layers:
            layer.to("cpu")
        return model.to("cpu")

    def attach(self, model: Any, optimizer: Any, schedule: Any) -> None:
        """The prepared model, torch's optimizer below whatever wraps it, and what sets its learning rate."""
        self.module = model
        self.updater = Updater(getattr(model, "module", model), self.cell.optimizer, optimizer, schedule)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Around backward passes whose gradients are to stay: nothing is updated while it lasts."""
        yield

    def reported_norm(self, clipped: Any) -> Tensor:
        """The gradient's norm before clipping, after an update; `clipped` is what clipping returned."""
        whole = clipped.full_tensor() if hasattr(clipped, "full_tensor") else clipped
        return torch.as_tensor(whole)


class StackDDP(StackEngine, DDP):
    def placed(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> Any:
        deque(layers, maxlen=0)
        return model.to(device)


class StackFSDP2(StackEngine, FSDP2):
    """As FSDP2, once it is attached."""


class StackZero3(StackEngine, Zero3):
    """Under Accelerate the engine's backward updates, too, at the end of a step."""

    def placed(self, model: nn.Module, layers: Iterable[nn.Module], device: torch.device) -> Any:  # noqa: ARG002
        """Sharded layer by layer, as `from_pretrained` loads a model under ZeRO-3; no rank holds it whole."""
        for part in itertools.chain(layers, [model]):
            keep_own_share(part, self.cell)
        return model

    def attach(self, model: Any, optimizer: Any, schedule: Any) -> None:
        del optimizer
        self.engine = self.module = model
        self.schedule = schedule

    def update(self) -> Tensor:
        norm = super().update()
        self.schedule.step()
        return norm

    @contextmanager
    def held(self) -> Iterator[None]:
        self.engine.step = lambda: None
        try:
            yield
        finally:
            del self.engine.step

    def reported_norm(self, clipped: Any) -> Tensor:
        """DeepSpeed clips where it updates, so that it knows the norm only then."""
        del clipped
        return torch.as_tensor(self.engine.get_global_grad_norm())


STACK_ENGINES: Mapping[str, type[StackDDP | StackFSDP2 | StackZero3]] = {
    "ddp": StackDDP,
    "fsdp2": StackFSDP2,
    "zero3": StackZero3,
}


def bare_optimizer(wrapped: Any) -> torch.optim.Optimizer:
    """The optimizer of torch below Accelerate's wrapper and DeepSpeed's."""
    found: Any = wrapped.optimizer
    while not isinstance(found, torch.optim.Optimizer):
        found = found.optimizer
    return found
