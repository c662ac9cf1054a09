"""Base classes of engines, which wrap a model for training and may shard its parameters.

An engine treats the ranks of a sequence group as plain data-parallel ranks and averages gradients over all
ranks. In a bf16 cell every engine computes in bf16 and keeps master weights and optimizer state in float32.
DeepSpeed reduces gradients in bf16, its default; DDP and our FSDP2 reduce them in float32.
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
    """Prefix that the engine puts before the names of the parameters that it returns."""

    def __init__(
        self,
        model: ModelWithLoss,
        layers: Iterable[nn.Module],
        cell: Cell,
        groups: RankGroups,
        device: torch.device,
    ) -> None:
        """Fill and wrap a model on the meta device.

        Taking a decoder layer from the iterator `layers` fills it with weights; exhausting the iterator fills
        the rest of the model.
        """
        self.cell, self.groups = cell, groups
        self.wrap(model, layers, device)

    @abstractmethod
    def wrap(self, model: ModelWithLoss, layers: Iterable[nn.Module], device: torch.device) -> None:
        """Take all `layers`, which fills the model, wrap the model for training and set `module`.

        An engine that shards a layer does so before it takes the next, so that a rank holds one whole layer.
        """

    def micro_step(self, *, last: bool) -> AbstractContextManager[Any]:  # noqa: ARG002
        """Return the context of forward and backward; only the `last` micro-step must reduce gradients."""
        return nullcontext()

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Run backward from `loss` and accumulate gradients."""

    @abstractmethod
    def update(self) -> Tensor:
        """Clip gradients, step and clear gradients; return the norm before clipping, a scalar tensor."""

    @abstractmethod
    def full_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the whole averaged gradient of every parameter.

        Call this after the last backward and before `update`. Every rank must take all gradients, because
        each may need a collective. They come one at a time, as all of them may not fit in memory.
        """

    @abstractmethod
    def shards(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of every parameter and the shard that this rank's optimizer updates, maybe empty."""

    @abstractmethod
    def optimizer_state(self, key: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of every parameter, and a tensor of optimizer state for this rank's shard of it.

        Parameters without such a tensor are left out, for example all parameters before the first update.

        Args:
            key: Name of the tensor in the optimizer's state, such as AdamW's `exp_avg`.
        """

    @property
    @abstractmethod
    def shard_index(self) -> int:
        """Number of this rank's shard; ranks with the same number hold copies of one shard."""

    def offloaded_bytes(self) -> int | None:
        """Return the bytes that a step copies to and from an optimizer in host memory; None without one.

        Gradients are copied to host memory, and updated weights back. Other copies of an engine do not count.
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
