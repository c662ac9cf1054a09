"""Hidden states that a loop gathers from all ranks before the head, and the gradient that reaches the layers.

Every rank then has logits of the whole sequence. The gradient of the gathered states must be summed over the
ranks on its way back to the layers. Gradients are compared by their products with one random vector.

Letters of shapes: B sequences, S tokens of the shard, T tokens of the whole sequence, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from bench.common.deferred_errors import DeferredErrors
from bench.extras.observe.gradient_factor import closest_factor
from bench.extras.observe.tokens import find_shard
from bench.measure.hooks import Hook

HIDDEN_DIMENSIONS = 3


@dataclass(slots=True)
class Gather:
    """Gather of one call of the model."""

    index: Tensor
    """Indices of this rank's tokens in the gathered sequence, [S]."""
    shard: Tensor | None = None
    """Gradient of this rank's states before the gather times the random vector, [B, S]."""
    whole: Tensor | None = None
    """Gradient of the gathered states times the random vector, [B, T]."""

    def layer_factors(self, wholes: Sequence[Tensor | None]) -> tuple[float, float] | None:
        """Return the layers' gradient as a multiple of this rank's head gradient, and of the sum over ranks.

        `wholes` are the gradients of the gathered states on all ranks. None if a gradient is missing.
        """
        known = [whole for whole in wholes if whole is not None]
        if self.shard is None or self.whole is None or len(known) < len(wholes):
            return None
        local, total = (x[:, self.index] for x in (self.whole, torch.stack(known).sum(dim=0)))
        return closest_factor(self.shard, local), closest_factor(self.shard, total)


class GatheredStates:
    """Watches the last place in a call where states of a shard are followed by those of a whole sequence."""

    def __init__(self, network: nn.Module, ranks: int) -> None:
        self._network = network
        self._ranks = ranks
        self._length = 0
        self._shard: Tensor | None = None
        self._whole: Tensor | None = None
        self._errors = DeferredErrors()

    @contextmanager
    def watch_step(self, length: int) -> Iterator[None]:
        """Watch the calls of one step; `length` is the number of tokens of a shard."""
        self._length = length
        with ExitStack() as hooks:
            for module in self._network.modules() if self._ranks > 1 else ():
                hooks.callback(module.register_forward_pre_hook(Hook(self._see)).remove)
                # First of all hooks: a later one may gather the output.
                hooks.callback(module.register_forward_hook(Hook(self._see), prepend=True).remove)
            yield
        self._shard = self._whole = None
        self._errors.raise_first()

    def take(self) -> Gather | None:
        """Return the gather of the call whose forward is ending; None if there was none."""
        shard, whole, self._shard, self._whole = self._shard, self._whole, None, None
        if shard is None or whole is None:
            return None
        index = find_shard(whole.detach()[..., 0], shard.detach()[..., 0], self._ranks)
        if index is None:
            return None
        gather = Gather(index)
        vector = torch.randn(shard.shape[-1], generator=torch.Generator().manual_seed(0)).to(shard)
        for name, states in {"shard": shard, "whole": whole}.items():
            states.register_hook(partial(self._store_product, gather, name, vector))
        return gather

    def _see(self, _module: nn.Module, *values: object) -> None:
        """Store states among the inputs of a module or, if `values` has it, its output."""
        with self._errors:
            for x in tree_leaves(values[-1]):
                if not isinstance(x, Tensor) or not x.requires_grad or x.dim() != HIDDEN_DIMENSIONS:
                    continue
                if x.shape[1] == self._length:
                    self._shard, self._whole = x, None
                elif self._whole is None and self._shard is not None:
                    sequences, tokens, size = self._shard.shape
                    is_gathered = x.shape == (sequences, tokens * self._ranks, size)
                    self._whole = x if is_gathered else None

    def _store_product(self, gather: Gather, name: str, vector: Tensor, gradient: Tensor) -> None:
        with self._errors:
            setattr(gather, name, (gradient.detach() @ vector.to(gradient.dtype)).double().cpu())
