"""A model wrapped by an engine, as trainers and passes use it.

To every engine sequence ranks are plain data-parallel ranks: it averages gradients over all of them.
Mixed precision is each engine's own: bf16 compute over float32 parameters and optimizer state. In a bf16 cell
DeepSpeed reduces gradients in bf16, its default, DDP and our FSDP2 in float32: engines differ in bytes.
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
    """A model wrapped for training. One micro-step is `forward` and `backward`; `update` ends the step."""

    module: nn.Module
    prefix: ClassVar[str] = ""
    """Beginning of the names of the wrapped model's parameters."""

    def __init__(
        self,
        model: ModelWithLoss,
        layers: Iterable[nn.Module],
        cell: Cell,
        groups: RankGroups,
        device: torch.device,
    ) -> None:
        """Each of `layers` has its numbers when it is taken, and the rest of the model when all are."""
        self.cell, self.groups = cell, groups
        self.wrap(model, layers, device)

    @abstractmethod
    def wrap(self, model: ModelWithLoss, layers: Iterable[nn.Module], device: torch.device) -> None:
        """Set `module`, the model as it is trained."""

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return the context of forward and backward; the last micro-step of a step reduces gradients."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None: ...

    @abstractmethod
    def update(self) -> Tensor:
        """Clip, step and clear; the gradient norm before clipping, as a scalar tensor."""

    @abstractmethod
    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and whole averaged gradient, after the last backward and before `update`.

        One at a time, because those of a large model need not fit together; every rank must take them all.
        """

    @abstractmethod
    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and what this rank's optimizer updates of it, which may be nothing."""

    @abstractmethod
    def optimizer_state(self, key: str) -> Iterator[tuple[str, Tensor]]:
        """Every parameter's name and what the optimizer keeps of its shard under this key, if anything."""

    @property
    @abstractmethod
    def shard_index(self) -> int:
        """Return the number of this rank's shard; ranks with the same number hold replicas."""

    def offloaded_bytes(self) -> int | None:
        """Return the bytes that a step copies to and from an optimizer in host memory; None without one.

        Gradients one way and weights the other. Further copies of an engine are not counted.
        """
        return None


class TorchEngine(Engine):
    """An engine of torch, which leaves clipping and the optimizer's step to its user."""

    updater: Updater

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> Tensor:
        return _whole(self.updater.update())

    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        gradients = [(name, p.grad) for name, p in self._named()]
        yield from ((name, _whole(grad)) for name, grad in gradients if grad is not None)

    def shards(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, _own(p.detach())) for name, p in self._named())

    def optimizer_state(self, key: str) -> Iterator[tuple[str, Tensor]]:
        state = self.updater.optimizer.state
        yield from ((name, _own(state[p][key])) for name, p in self._named() if key in state.get(p, ()))

    def _named(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.updater.model.named_parameters(self.prefix)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
