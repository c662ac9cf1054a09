"""What the passes need of a training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from bench.config import RunConfig
from bench.ranks.log import StepPhase
from bench.strategies.strategy import Batch, Strategy, Wiring
from bench.training.data import FedTokens, StepData
from bench.training.engines import Engine


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step as this rank saw it, in tensors that the device may still be computing."""

    loss_sum: Tensor
    """Sum of this rank's token losses."""
    valid_tokens: Tensor
    """Tokens that count in the loss, over all ranks."""
    grad_norm: Tensor
    """Norm of the whole gradient before clipping, over all ranks."""
    fed_digest: Tensor
    """Of the tokens that entered this rank's model."""


@dataclass(slots=True)
class Trainer(ABC):
    """A training loop, one optimizer step at a time. It reads the `wiring`, never a strategy's name."""

    cell: RunConfig
    engine: Engine
    strategy: Strategy
    wiring: Wiring
    data: StepData
    phase: StepPhase
    """Told where in a step the loop is."""
    fed: FedTokens
    """Told by the model of what it is given."""

    @abstractmethod
    def step(self, number: int, seq_len: int) -> StepOutcome:
        """Fetch the batches of step `number`, run all micro-steps, update."""

    @abstractmethod
    def accumulate(self, number: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """All of a step but the update, gradients left in place: local loss sum, global valid tokens."""

    def fetch(self, number: int, seq_len: int) -> list[Batch]:
        """What this rank's model is fed in a step, one batch per micro-step."""
        data_rank = self.strategy.groups.data_rank
        whole = [
            self.data.micro_batch(number, micro_step, data_rank, seq_len)
            for micro_step in range(self.cell.grad_accum)
        ]
        return [self.strategy.shard(batch) for batch in whole] if self.wiring.shards_batch else whole
