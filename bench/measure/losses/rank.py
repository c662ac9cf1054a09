"""Losses, gradient norms and token digests of every full-length step, gathered after the last."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from bench.measure.losses.section import LossesSection
from bench.measure.rank_pass import RankPass
from bench.training.data import StepData, digest
from bench.training.trainers.trainer import StepOutcome, Trainer


class LossesPass(RankPass):
    def part(self) -> LossesSection | None:
        measurement = self.measurement
        trainer = measurement.subject.trainer
        if trainer is None:
            return None
        with measurement.log.during("losses"):
            return collect_losses([*measurement.timed.outcomes, *measurement.later], trainer)


def collect_losses(outcomes: Sequence[StepOutcome], trainer: Trainer) -> LossesSection:
    """Losses, gradient norms and token digests; every rank must call it, every rank gets the global ones."""
    own_sums = torch.stack([outcome.loss_sum.double() for outcome in outcomes])
    loss_sums = own_sums.clone()
    dist.all_reduce(loss_sums)
    valid = torch.stack([outcome.valid_tokens for outcome in outcomes])
    if trainer.counts_own_tokens:
        dist.all_reduce(valid)
    data, seq_len = trainer.data, trainer.cell.padded_len
    return LossesSection(
        loss_sums=[own_sums.tolist()],
        loss=(loss_sums / valid.clamp(min=1)).tolist(),
        grad_norm=[float(outcome.grad_norm) for outcome in outcomes],
        valid_tokens=valid.tolist(),
        tokens_digest=[all_fed(outcome.fed_digest.to(data.device)) for outcome in outcomes],
        expected_digest=[expected_digest(data, step, seq_len) for step in range(len(outcomes))],
        logged_loss=_logged(outcomes, mean_of_ranks=trainer.logs_mean_of_ranks),
    )


def _logged(outcomes: Sequence[StepOutcome], *, mean_of_ranks: bool) -> list[float] | None:
    """What a training stack logs of each step, None where the loop is ours."""
    own = [outcome.logged_loss for outcome in outcomes if outcome.logged_loss is not None]
    if not own:
        return None
    logged = torch.stack(own)
    if mean_of_ranks:
        dist.all_reduce(logged)
        logged = logged / dist.get_world_size()
    found: list[float] = logged.tolist()
    return found


def all_fed(own: Tensor) -> str:
    """The digest of what entered all ranks' models; every rank must call it."""
    total = own.clone()
    dist.all_reduce(total)  # int64 wraps round, as the digest does
    return _hexadecimal(total)


def expected_digest(data: StepData, step: int, seq_len: int) -> str:
    """The same digest from the data alone, without any sharding."""
    whole = data.whole_step(step, seq_len)
    each = [digest(batch.input_ids, batch.labels, batch.position_ids) for batch in whole]
    return _hexadecimal(torch.stack(each).sum())


def _hexadecimal(value: Tensor) -> str:
    return f"{int(value) % 2**64:016x}"


PASS = LossesPass
