"""Our own training loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from bench.config import RunConfig
from bench.ranks.log import StepPhase
from bench.strategies.strategy import Batch, Strategy, Wiring
from bench.training.data import StepData, count_valid
from bench.training.engines import Engine
from bench.training.loss import backward_loss
from bench.training.trainers.trainer import StepOutcome, Trainer


@dataclass(slots=True)
class NativeTrainer(Trainer):
    """Our own loop: what a careful user writes by hand, and no more."""

    cell: RunConfig
    engine: Engine
    strategy: Strategy
    wiring: Wiring
    data: StepData
    phase: StepPhase

    def step(self, number: int, seq_len: int) -> StepOutcome:
        loss_sum, valid_tokens = self.accumulate(number, seq_len)
        self.phase.enter("optimizer")
        outcome = StepOutcome(loss_sum, valid_tokens, self.engine.update())
        self.phase.enter(None)
        return outcome

    def accumulate(self, number: int, seq_len: int) -> tuple[Tensor, Tensor]:
        """All micro-steps of a step, gradients left in place: local loss sum, global valid tokens."""
        self.phase.enter("load")
        batches = self.fetch(number, seq_len)
        valid_tokens = torch.stack([count_valid(batch.labels) for batch in batches]).sum()
        dist.all_reduce(valid_tokens)
        sums = [self._micro_step(batch, valid_tokens, last=batch is batches[-1]) for batch in batches]
        return torch.stack(sums).sum(), valid_tokens

    def fetch(self, number: int, seq_len: int) -> list[Batch]:
        """This rank's share of a step, one batch per micro-step."""
        data_rank = self.strategy.groups.data_rank
        whole = [
            self.data.micro_batch(number, micro_step, data_rank, seq_len)
            for micro_step in range(self.cell.grad_accum)
        ]
        return [self.strategy.shard(batch) for batch in whole] if self.wiring.shards_batch else whole

    def _micro_step(self, batch: Batch, valid_tokens: Tensor, *, last: bool) -> Tensor:
        with self.engine.micro_step(last=last), self.strategy.step(batch):
            self.phase.enter("forward")
            loss_sum: Tensor = self.engine.module(batch.input_ids, batch.labels, batch.position_ids)
            self.phase.enter("backward")
            self.engine.backward(backward_loss(loss_sum, valid_tokens, self.wiring.gradient_divisor))
        return loss_sum.detach()
