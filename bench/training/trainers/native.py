"""Trainer with the training loop of the harness."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from bench.strategies.strategy import Batch
from bench.training.data import count_valid
from bench.training.loss import backward_loss
from bench.training.trainers.trainer import StepOutcome, Trainer


@dataclass(slots=True)
class NativeTrainer(Trainer):
    """Training loop as a careful user of torch would write it."""

    prefetched: dict[tuple[int, int], list[Batch]] = field(init=False, default_factory=dict)
    """Batches of the next step, loaded ahead on a GPU, by (step number, seq_len)."""

    def step(self, number: int, seq_len: int) -> StepOutcome:
        loss_sum, valid_tokens = self.accumulate(number, seq_len)
        self.phase.enter("optimizer")
        outcome = StepOutcome(loss_sum, valid_tokens, self.engine.update(), self.input_digest.take())
        if self.data.device.type == "cuda":
            # The GPU is still busy with this step, which hides the loading. A CPU would save no time.
            self.phase.enter("load")
            self.prefetched = {(number + 1, seq_len): self.fetch(number + 1, seq_len)}
        self.phase.enter(None)
        return outcome

    def accumulate(self, number: int, seq_len: int) -> tuple[Tensor, Tensor]:
        self.input_digest.take()
        self.phase.enter("load")
        batches = self.prefetched.pop((number, seq_len), None) or self.fetch(number, seq_len)
        valid_tokens = torch.stack([count_valid(batch.labels) for batch in batches]).sum()
        dist.all_reduce(valid_tokens)
        sums = [self._micro_step(batch, valid_tokens, last=batch is batches[-1]) for batch in batches]
        return torch.stack(sums).sum(), valid_tokens

    def _micro_step(self, batch: Batch, valid_tokens: Tensor, *, last: bool) -> Tensor:
        with self.engine.micro_step(last=last), self.strategy.step(batch):
            self.phase.enter("forward")
            loss_sum: Tensor = self.engine.module(batch.input_ids, batch.labels, batch.position_ids)
            self.phase.enter("backward")
            self.engine.backward(self.loss_of(loss_sum, batch, valid_tokens))
        return loss_sum.detach()

    def loss_of(self, loss_sum: Tensor, batch: Batch, valid_tokens: Tensor) -> Tensor:  # noqa: ARG002
        """Return the loss of one micro-step to call `backward` on, from this rank's sum of token losses."""
        return backward_loss(loss_sum, valid_tokens, self.wiring.gradient_divisor)


TRAINER = NativeTrainer
