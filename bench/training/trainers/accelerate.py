"""Trainer with Accelerate, which runs the training loop that Accelerate's documentation shows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.nn.functional import all_gather

from bench.training.data import count_valid
from bench.training.optimizer import make_optimizer, make_schedule
from bench.training.trainers.stack import NEXT_LABELS, SHIFT_LABELS, StackTrainer
from bench.training.trainers.stack_engines import MIXED_PRECISION, bare_optimizer, parallelism
from bench.training.trainers.trainer import StepOutcome, WantsStep

SHARDED_IN_CONTEXT = "torch_cp"
"""Strategy that shards a whole batch in a context around forward and backward."""


@dataclass(slots=True)
class AccelerateTrainer(StackTrainer):
    accelerator: Any = None
    wrapped: Any = None
    """Model that `Accelerator.prepare` returned."""
    optimizer: Any = None
    schedule: Any = None

    def prepare(self) -> None:
        from accelerate import Accelerator

        cell = self.cell
        self.accelerator = Accelerator(
            mixed_precision=MIXED_PRECISION[cell.dtype],
            gradient_accumulation_steps=cell.grad_accum,
            parallelism_config=parallelism(cell),
            **self.engine.plugin(cell),
        )
        optimizer = make_optimizer(self.model, cell.optimizer)
        self.wrapped, self.optimizer = self.accelerator.prepare(self.model, optimizer)
        # A prepared schedule would advance by one step for each process.
        bare = bare_optimizer(self.optimizer)
        self.schedule = make_schedule(bare, cell.optimizer)
        self.engine.attach(self.wrapped, bare, self.schedule)

    def run_loop(self, wants_step: WantsStep) -> None:
        batches = self._batches(0, self.cell.padded_len)
        outcome = None
        while wants_step(outcome):
            outcome = self._step(batches)

    def step(self, number: int, seq_len: int) -> StepOutcome:
        return self._step(self._batches(number, seq_len))

    def accumulate(self, number: int, seq_len: int) -> tuple[Tensor, Tensor]:
        self.input_digest.take()
        batches = self._batches(number, seq_len)
        with self.engine.without_update():
            for _ in range(self.cell.grad_accum):
                self._micro_step(next(batches), updates=False)
        loss_sum, valid_tokens = self.loss_recorder.take()
        dist.all_reduce(valid_tokens)
        return loss_sum, valid_tokens

    def _batches(self, first_step: int, seq_len: int) -> Iterator[Any]:
        return self.rank_batches(self.accelerator, self.wrapped, first_step, seq_len)

    def _step(self, batches: Iterator[Any]) -> StepOutcome:
        self.input_digest.take()
        losses, norm = [], None
        for _ in range(self.cell.grad_accum):
            self.phase.enter("load")
            loss, norm = self._micro_step(next(batches), updates=True)
            losses.append(loss)
        self.phase.enter(None)
        loss_sum, valid_tokens = self.loss_recorder.take()
        logged, digest = torch.stack(losses).mean(), self.input_digest.take()
        return StepOutcome(loss_sum, valid_tokens, self.engine.reported_norm(norm), digest, logged)

    def _micro_step(self, batch: dict[str, Tensor], *, updates: bool) -> tuple[Tensor, Any]:
        """Run the loop body of Accelerate's documentation; return the loss and the norm from clipping.

        The norm is None before the last micro-step of a step, and if `updates` is False.
        """
        accelerator, norm = self.accelerator, None
        batch = {name: column.to(accelerator.device) for name, column in batch.items()}
        with accelerator.accumulate(self.wrapped):
            with self._shard_context(batch):
                loss = self._loss(batch)
                accelerator.backward(loss)
            if updates:
                self.phase.enter("optimizer")
                if accelerator.sync_gradients:
                    max_norm = self.cell.optimizer.max_grad_norm or math.inf
                    norm = accelerator.clip_grad_norm_(self.wrapped.parameters(), max_norm)
                self.optimizer.step()
                if accelerator.sync_gradients:
                    self.schedule.step()
                self.optimizer.zero_grad()
        return loss.detach(), norm

    def _shard_context(self, batch: dict[str, Tensor]) -> AbstractContextManager[Any]:
        """Return the context in which torch_cp shards the batch; an empty one for other strategies."""
        if self.cell.strategy != SHARDED_IN_CONTEXT:
            return nullcontext()
        columns = list(batch.values())
        context: AbstractContextManager[Any] = self.accelerator.maybe_context_parallel(
            buffers=columns, buffer_seq_dims=[1] * len(columns), no_restore_buffers=set(columns)
        )
        return context

    def _loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Return the loss that the model computes, averaged over the ranks of the sequence group."""
        if NEXT_LABELS in batch:
            batch["labels"] = batch[SHIFT_LABELS] = batch.pop(NEXT_LABELS).contiguous()
        loss: Tensor = self.wrapped(**batch).loss
        if self.cell.sp_degree == 1:
            return loss
        return mean_over_group(loss, batch[SHIFT_LABELS], self.strategy.groups.sequence)


def mean_over_group(loss: Tensor, labels: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean loss of a sequence, from the mean loss of this rank's shard; it is differentiable.

    Shards are weighted by their valid tokens, as in Accelerate's documentation.
    """
    valid = count_valid(labels)
    losses = all_gather(loss, group=group)
    counts = all_gather(valid, group=group)
    weighted = zip(losses, counts, strict=True)
    total = sum(shard_loss * count for shard_loss, count in weighted if count > 0)
    mean: Tensor = total / torch.stack(counts).sum().clamp(min=1)
    return mean


TRAINER = AccelerateTrainer
