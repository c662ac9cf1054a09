"""Table of the optimizers. Torch is imported only when an optimizer is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

BETAS = (0.9, 0.999)
"""Decay rates of AdamW's running means of gradients and of squared gradients."""
MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class OptimizerFacts:
    """Facts of one optimizer."""

    make: Callable[[Iterable[nn.Parameter], float], Optimizer]
    """Constructor from parameters and a learning rate."""
    state_keys: tuple[str, ...]
    """Keys in `optimizer.state` of the tensors with a parameter's shape, beginning with the first moment."""
    first_share: float
    """Share of an update's gradient in the first moment."""
    decay: float
    """Share of the first moment that stays in the next update."""

    @property
    def moments(self) -> int:
        """Number of elements of optimizer state per element of a parameter."""
        return len(self.state_keys)


def _adamw(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    from torch.optim import AdamW

    return AdamW(parameters, lr=learning_rate, betas=BETAS, fused=True)


def _sgd(parameters: Iterable[nn.Parameter], learning_rate: float) -> Optimizer:
    from torch.optim import SGD

    # Not fused, because FSDP2's parameters are DTensors, which have no fused SGD.
    return SGD(parameters, lr=learning_rate, momentum=MOMENTUM)


OPTIMIZER_FACTS: Mapping[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(_adamw, ("exp_avg", "exp_avg_sq"), 1 - BETAS[0], BETAS[0]),
    "sgd": OptimizerFacts(_sgd, ("momentum_buffer",), 1.0, MOMENTUM),
}
