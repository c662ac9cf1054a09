"""A training loop, one optimizer step at a time. A trainer reads the Wiring, never a strategy's name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step as this rank saw it: tensors that nobody has waited for yet.

    `loss_sum` is local, `valid_tokens` and `grad_norm` are global.
    """

    loss_sum: Tensor
    valid_tokens: Tensor
    grad_norm: Tensor


class Trainer(ABC):
    """A training loop, one optimizer step at a time."""

    @abstractmethod
    def step(self, number: int, seq_len: int) -> StepOutcome:
        """Fetch the batches of step `number`, run all micro-steps, update."""
