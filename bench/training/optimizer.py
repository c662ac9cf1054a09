"""The optimizer, its schedule and clipping: one table, the same for every engine and trainer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from bench.config import OptimizerConfig

BETAS = (0.9, 0.999)
"""How much Adam keeps of its running means of gradients and of their squares."""
MOMENTUM = 0.9


@dataclass(frozen=True, slots=True)
class OptimizerKind:
    """How an optimizer is made of parameters and a learning rate, and what shows its first gradient."""

    make: Callable[[Iterable[nn.Parameter], float], torch.optim.Optimizer]
    keys: Sequence[str]
    """Of all that its state holds of a parameter's size; the first moment is the first of them."""
    first_share: float
    """How much of the gradient the first moment is after the first update."""


def _adamw(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=learning_rate, betas=BETAS, fused=True)


def _sgd(parameters: Iterable[nn.Parameter], learning_rate: float) -> torch.optim.Optimizer:
    # Not fused: FSDP2's sharded tensors have no such operator.
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=MOMENTUM)


OPTIMIZERS: Mapping[str, OptimizerKind] = {
    "adamw": OptimizerKind(_adamw, ("exp_avg", "exp_avg_sq"), 1 - BETAS[0]),
    "sgd": OptimizerKind(_sgd, ("momentum_buffer",), 1.0),
}


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimizer over all parameters of the model."""
    return OPTIMIZERS[config.name].make(model.parameters(), config.learning_rate)


def make_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> LRScheduler:
    """What sets the optimizer's learning rate after each step: transformers' own, as Trainer takes it."""
    schedule: LRScheduler = get_scheduler(
        config.schedule,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.schedule_steps,
    )
    return schedule


def clipped_norm(norm: float, config: OptimizerConfig) -> float:
    """The norm of a gradient once it is clipped."""
    return min(norm, config.max_grad_norm or math.inf)


class Updater:
    """The end of a step of an engine that leaves clipping to its user."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: LRScheduler | None = None,
    ) -> None:
        """With the optimizer and the schedule that a training stack has, or else with new ones."""
        self.model = model
        self.max_grad_norm = config.max_grad_norm or math.inf
        self.optimizer = optimizer or make_optimizer(model, config)
        self.schedule = schedule or make_schedule(self.optimizer, config)

    def update(self) -> Tensor:
        """Clip, step and clear; the gradient norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm
