"""What the passes need of a training loop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn

from bench.attention.watch import AttentionWatch
from bench.config import Cell
from bench.ranks.log import StepPhase
from bench.strategies.strategy import Batch, Strategy, Wiring
from bench.training.data import InputDigest, StepData
from bench.training.engines import engine_code
from bench.training.engines.engine import Engine
from bench.training.loss import ModelWithLoss


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """One step as this rank saw it, in tensors that the device may still be computing."""

    loss_sum: Tensor
    """Sum of this rank's token losses."""
    valid_tokens: Tensor
    """Tokens that count in the loss, over all ranks; over this one where the trainer `counts_own_tokens`."""
    grad_norm: Tensor
    """Norm of the whole gradient before clipping, over all ranks."""
    fed_digest: Tensor
    """Of the tokens that entered this rank's model."""
    logged_loss: Tensor | None = None
    """The loss that a training stack has of this step on this rank; None where the loop is ours."""


NextStep = Callable[[StepOutcome | None], bool]
"""Told of the step that is over, None before the first; whether another one is to be run."""


@dataclass(slots=True)
class Trainer(ABC):
    """A training loop, one optimizer step at a time. It reads the `wiring`, never a strategy's name."""

    cell: Cell
    engine: Engine
    strategy: Strategy
    wiring: Wiring
    data: StepData
    phase: StepPhase
    """Told where in a step the loop is."""
    fed: InputDigest
    """Told by the model of what it is given."""

    counts_own_tokens: ClassVar[bool] = False
    """Whether outcomes count the valid tokens of this rank alone; they are added up after the last step."""

    logs_mean_of_ranks: ClassVar[bool] = False
    """Whether a stack logs the mean of all ranks' `logged_loss`; it is taken after the last step."""

    @classmethod
    def build(
        cls,
        model: ModelWithLoss,
        layers: Iterator[nn.Module],
        data: StepData,
        strategy: Strategy,
        wiring: Wiring,
        device: torch.device,
        phase: StepPhase,
    ) -> Self:
        """The loop around the cell's engine; the numbers of each of `layers` are set when it is taken."""
        engine = engine_code(strategy.cell.engine.name)(model, layers, strategy.cell, strategy.groups, device)
        return cls(strategy.cell, engine, strategy, wiring, data, phase, model.fed)

    @abstractmethod
    def step(self, number: int, seq_len: int) -> StepOutcome:
        """Fetch the batches of step `number`, run all micro-steps, update."""

    @abstractmethod
    def accumulate(self, number: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """All of a step but the update, gradients left in place: local loss sum, global valid tokens."""

    def run(self, next_step: NextStep) -> None:
        """Full-length steps, numbered from 0, for as long as another one is wanted."""
        number, outcome = 0, None
        while next_step(outcome):
            outcome = self.step(number, self.cell.padded_len)
            number += 1

    @property
    def attention_name(self) -> str:
        """The name under which transformers finds the attention that runs."""
        return self.wiring.attention_name

    @property
    def attention_code(self) -> str:
        """How the names of the Python modules begin that hold the attention's own code."""
        return f"{self.strategy.package_name}."

    @property
    def step_period(self) -> int:
        """After so many steps the loop makes the same calls again."""
        return 1

    def watched(self, watch: AttentionWatch) -> AbstractContextManager[None]:
        """Let a watch see every call of attention for as long as the context lasts."""
        return self.strategy.watched(watch)

    def fetch(self, number: int, seq_len: int) -> list[Batch]:
        """What this rank's model is fed in a step, one batch per micro-step; only its shard is copied."""
        data_rank = self.strategy.groups.data_rank
        rows = [
            self.data.rows(number, micro_step, data_rank, seq_len)
            for micro_step in range(self.cell.grad_accum)
        ]
        if self.wiring.shards_batch:
            rows = [self.strategy.shard(batch) for batch in rows]
        return [batch.to(self.data.device) for batch in rows]
