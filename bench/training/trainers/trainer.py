"""Base class of trainers, the training loops whose steps the passes request and measure."""

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
from bench.training.position_losses import PositionLosses


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Results of one step on this rank, in tensors that the device may still be computing."""

    loss_sum: Tensor
    """Sum of this rank's token losses."""
    valid_tokens: Tensor
    """Number of tokens that count in the loss, of all ranks; of this rank alone if `counts_own_tokens`."""
    grad_norm: Tensor
    """Norm of the whole gradient of all ranks, before clipping."""
    input_digest: Tensor
    """Digest of the tokens that entered this rank's model."""
    logged_loss: Tensor | None = None
    """Loss that a training stack logs for this step on this rank; None with the native loop."""


WantsStep = Callable[[StepOutcome | None], bool]
"""Function that a loop calls before each step, with the outcome of the previous step (None before the
first). It returns whether to run the step."""


@dataclass(slots=True)
class Trainer(ABC):
    """Training loop, one optimizer step at a time.

    It depends on a strategy only through its `wiring`, never through its name. The argument `seq_len` of a
    method is the number of tokens of a whole sequence: `cell.padded_len`, or less in a short step.
    """

    cell: Cell
    engine: Engine
    strategy: Strategy
    wiring: Wiring
    data: StepData
    phase: StepPhase
    """Recorder of the phase of a step in which the loop is."""
    input_digest: InputDigest
    """Digest of the model's inputs."""
    position_losses: PositionLosses
    """Recorder of the token losses of one step by position."""

    counts_own_tokens: ClassVar[bool] = False
    """True if outcomes count the valid tokens of this rank only; the sum over ranks follows the last step."""

    logs_mean_of_ranks: ClassVar[bool] = False
    """True if a stack logs the mean of `logged_loss` over ranks, which is computed after the last step."""

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
        """Return the trainer of a cell, with the model wrapped by the cell's engine.

        The model is on the meta device. Taking a decoder layer from the iterator `layers` fills it with
        weights; exhausting the iterator fills the rest of the model.
        """
        engine = engine_code(strategy.cell.engine.name)(model, layers, strategy.cell, strategy.groups, device)
        recorders = model.input_digest, model.position_losses
        return cls(strategy.cell, engine, strategy, wiring, data, phase, *recorders)

    @abstractmethod
    def step(self, number: int, seq_len: int) -> StepOutcome:
        """Load the batches of step `number`, run all micro-steps and update the parameters."""

    @abstractmethod
    def accumulate(self, number: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """Run all micro-steps of a step without an update, so that gradients stay.

        Returns:
            Sum of this rank's token losses, and the number of valid tokens of all ranks.
        """

    def run(self, wants_step: WantsStep) -> None:
        """Run full-length steps 0, 1, 2, ... as long as `wants_step` returns True.

        It is called before each step, with the outcome of the previous step or None before the first.
        """
        number, outcome = 0, None
        while wants_step(outcome):
            outcome = self.step(number, self.cell.padded_len)
            number += 1

    @property
    def attention_name(self) -> str:
        """Name of the attention function in transformers' registry."""
        return self.wiring.attention_name

    @property
    def attention_modules(self) -> str:
        """Prefix of the names of the Python modules that hold the code of the attention."""
        return f"{self.strategy.package_name}."

    @property
    def step_period(self) -> int:
        """Number of steps after which the communication calls of the loop repeat."""
        return 1

    def watch_attention(self, watch: AttentionWatch) -> AbstractContextManager[None]:
        """Report every attention call in this context to `watch`."""
        return self.strategy.watch_attention(watch)

    def fetch(self, number: int, seq_len: int) -> list[Batch]:
        """Return this rank's batches of a step on the device, one per micro-step.

        If the trainer shards batches for the strategy, only this rank's shards are copied to the device.
        """
        data_rank = self.strategy.groups.data_rank
        batches = [
            self.data.host_micro_batch(number, micro_step, data_rank, seq_len)
            for micro_step in range(self.cell.grad_accum)
        ]
        if self.wiring.shards_batch:
            batches = [self.strategy.shard(batch) for batch in batches]
        return [batch.to_device(self.data.device) for batch in batches]
