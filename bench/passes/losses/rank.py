"""Losses, gradient norms and token digests, gathered once the clock has stopped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from bench.passes.losses.section import RankLosses
from bench.passes.rank_pass import RankPass, Steps
from bench.training.data import StepData, digest
from bench.training.trainers.trainer import StepOutcome, Trainer

DIGESTED_STEPS = 1
_HALF_BITS = 32


class LossesPass(RankPass):
    losses: RankLosses | None = None

    def run(self) -> Steps:
        trainer = self.measurement.subject.trainer
        if trainer is not None:
            with self.measurement.log.during("losses"):
                self.losses = collect_losses(self.measurement.timed.outcomes, trainer)
        yield from ()

    def part(self) -> RankLosses | None:
        return self.losses


def collect_losses(outcomes: Sequence[StepOutcome], trainer: Trainer) -> RankLosses:
    """Losses, gradient norms and token digests; every rank must call it, every rank gets the global ones."""
    own_sums = torch.stack([outcome.loss_sum.double() for outcome in outcomes])
    loss_sums = own_sums.clone()
    dist.all_reduce(loss_sums)
    valid = torch.stack([outcome.valid_tokens for outcome in outcomes])
    steps, seq_len = range(DIGESTED_STEPS), trainer.cell.seq_len
    return RankLosses(
        loss_sums=own_sums.tolist(),
        loss=(loss_sums / valid.clamp(min=1)).tolist(),
        grad_norm=[float(outcome.grad_norm) for outcome in outcomes],
        valid_tokens=valid.tolist(),
        tokens_digest=[seen_digest(trainer, step, seq_len) for step in steps],
        expected_digest=[expected_digest(trainer.data, step, seq_len) for step in steps],
    )


def seen_digest(trainer: Trainer, step: int, seq_len: int) -> str:
    """The digest of what all ranks' models are fed in a step, each sequence group's shards added up."""
    own = sum(digest(batch) for batch in trainer.fetch(step, seq_len)) % 2**64
    halves = torch.tensor([own >> _HALF_BITS, own % 2**_HALF_BITS], device=trainer.data.device)
    dist.all_reduce(halves)
    high, low = (int(half) for half in halves)
    return f"{((high << _HALF_BITS) + low) % 2**64:016x}"


def expected_digest(data: StepData, step: int, seq_len: int) -> str:
    """The same digest from the data alone, without any sharding."""
    return f"{sum(map(digest, data.whole_step(step, seq_len))) % 2**64:016x}"


PASS = LossesPass
