"""Optimizer, learning rate schedule and clipping, which all engines and trainers share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from transformers import get_scheduler

from bench.config import OptimizerConfig
from bench.training.optimizer_facts import OPTIMIZER_FACTS


def make_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """Return the optimizer over all parameters of the model."""
    return OPTIMIZER_FACTS[config.name].make(model.parameters(), config.learning_rate)


def make_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> LRScheduler:
    """Return the learning rate schedule of transformers, as its Trainer makes it."""
    schedule: LRScheduler = get_scheduler(
        config.schedule,
        optimizer,
        num_warmup_steps=config.warmup_steps,
        num_training_steps=config.schedule_steps,
    )
    return schedule


def clipped_norm(norm: float, config: OptimizerConfig) -> float:
    """Return the norm that a gradient of norm `norm` has after clipping."""
    return min(norm, config.max_grad_norm or math.inf)


class Updater:
    """Gradient clipping and update at the end of a step, for engines that do neither themselves."""

    def __init__(
        self,
        model: nn.Module,
        config: OptimizerConfig,
        optimizer: torch.optim.Optimizer | None = None,
        schedule: LRScheduler | None = None,
    ) -> None:
        """Use the optimizer and the schedule of a training stack, or make new ones."""
        self.model = model
        self.max_grad_norm = config.max_grad_norm or math.inf
        self.optimizer = optimizer or make_optimizer(model, config)
        self.schedule = schedule or make_schedule(self.optimizer, config)

    def update(self) -> Tensor:
        """Clip gradients, step and clear gradients; return the gradient norm before clipping."""
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm
