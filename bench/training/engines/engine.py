"""Base classes of engines: a model wrapped for training, with one interface for trainers and passes.

An engine treats the ranks of a sequence group as plain data-parallel ranks and averages gradients over all
ranks. It brings its own mixed precision, with bf16 compute and float32 parameters and optimizer state. In a
bf16 cell DeepSpeed reduces gradients in bf16, its default, while DDP and our FSDP2 reduce them in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bench.config import Cell
from bench.ranks.groups import RankGroups
from bench.training.loss import ModelWithLoss
from bench.training.optimizer import Updater


class Engine(ABC):
    """Model wrapped for training.

    A micro-step calls `module` and `backward` in the context `micro_step`; `update` ends the step.
    """

    module: nn.Module
    """Wrapped model."""
    prefix: ClassVar[str] = ""
    """Prefix of the parameter names that the engine returns."""

    def __init__(
        self,
        model: ModelWithLoss,
        layers: Iterable[nn.Module],
        cell: Cell,
        groups: RankGroups,
        device: torch.device,
    ) -> None:
        """Wrap a model.

        Args:
            model: Model on the meta device, filled in by iterating over `layers`.
            layers: Decoder layers of the model. A layer has its weights once it is taken, and the rest of the
                model once all layers are.
            cell: The cell.
            groups: Process groups of this rank.
            device: Device of this rank.
        """
        self.cell, self.groups = cell, groups
        self.wrap(model, layers, device)

    @abstractmethod
    def wrap(self, model: ModelWithLoss, layers: Iterable[nn.Module], device: torch.device) -> None:
        """Wrap the model for training and set `module`."""

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return the context of forward and backward; the last micro-step of a step reduces gradients."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None: ...

    @abstractmethod
    def update(self) -> Tensor:
        """Clip gradients, step and clear gradients; return the norm before clipping, a scalar tensor."""

    @abstractmethod
    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the whole averaged gradient of every parameter.

        Call this after the last backward and before `update`. Every rank must take all gradients. They come
        one at a time, because all gradients of a large model may not fit in memory.
        """

    @abstractmethod
    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of every parameter and the part, maybe empty, that this rank's optimizer updates."""

    @abstractmethod
    def optimizer_state(self, key: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the optimizer state of every parameter's shard that has a state `key`."""

    @property
    @abstractmethod
    def shard_index(self) -> int:
        """Number of this rank's shard; ranks with the same number hold replicas."""

    def offloaded_bytes(self) -> int | None:
        """Return the bytes that a step copies to and from an optimizer in host memory; None without one.

        These are the gradients one way and the weights the other. Further copies of an engine do not count.
        """
        return None


class TorchEngine(Engine):
    """Engine of torch, which leaves clipping and the optimizer's step to `updater`."""

    updater: Updater

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> Tensor:
        return _full_tensor(self.updater.update())

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        gradients = [(name, p.grad) for name, p in self._parameters()]
        yield from ((name, _full_tensor(grad)) for name, grad in gradients if grad is not None)

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, _local_tensor(p.detach())) for name, p in self._parameters())

    def optimizer_state(self, key: str) -> Iterator[tuple[str, Tensor]]:
        state = self.updater.optimizer.state
        for name, p in self._parameters():
            if key in state.get(p, ()):
                yield name, _local_tensor(state[p][key])

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.updater.model.named_parameters(self.prefix)


def _full_tensor(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _local_tensor(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
