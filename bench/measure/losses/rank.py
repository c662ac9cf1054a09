"""The losses pass on a rank: it collects losses, gradient norms and token digests after the last step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from msgspec.structs import replace
from torch import Tensor

from bench.measure.losses.gradient_sums import Sums, sum_first_moment, sums_of_gradient, with_seven_digits
from bench.measure.losses.section import BOUNDARIES, PARTS, FirstMoment, LossByPosition, LossesSection
from bench.measure.rank_pass import RankPass
from bench.training.data import StepData, batch_digest
from bench.training.optimizer_facts import OPTIMIZER_FACTS
from bench.training.trainers.trainer import StepOutcome, Trainer


class LossesPass(RankPass):
    gradients: Sums
    """Sums over the gradient of the first full-length step."""
    moment: FirstMoment | None = None

    @contextmanager
    def around_first_full_step(self) -> Iterator[None]:
        trainer, device = self.measurement.subject.trainer, self.measurement.subject.device
        if trainer is None:
            yield
            return
        self.measurement.raise_if_rank_failed()
        before = sum_first_moment(trainer.engine, device)
        with _recording_positions(trainer):
            yield
        self.measurement.raise_if_rank_failed()
        optimizer = OPTIMIZER_FACTS[trainer.cell.optimizer.name]
        self.gradients = sums_of_gradient(before, sum_first_moment(trainer.engine, device), optimizer)

    def after_checked_steps(self) -> None:
        """Sum the first moment of two or more steps; the gradient of the first is in `gradients`."""
        trainer, steps = self.measurement.subject.trainer, len(self.measurement.outcomes)
        if trainer is not None and steps > 1:
            self.measurement.raise_if_rank_failed()
            sums = sum_first_moment(trainer.engine, self.measurement.subject.device)
            self.moment = FirstMoment(steps=steps, sums=with_seven_digits(sums))

    def part(self) -> LossesSection | None:
        measurement = self.measurement
        trainer = measurement.subject.trainer
        if trainer is None:
            return None
        with measurement.log.run_phase("losses"):
            return replace(
                collect_losses(measurement.outcomes, trainer),
                gradients=with_seven_digits(self.gradients),
                moment=self.moment,
                by_position=collect_position_losses(trainer),
            )


def collect_losses(outcomes: Sequence[StepOutcome], trainer: Trainer) -> LossesSection:
    """Return global losses, gradient norms and token digests of steps 0, 1, ...; every rank must call it."""
    local_sums = torch.stack([outcome.loss_sum.double() for outcome in outcomes])
    loss_sums = local_sums.clone()
    dist.all_reduce(loss_sums)
    valid = torch.stack([outcome.valid_tokens for outcome in outcomes])
    if trainer.counts_own_tokens:
        dist.all_reduce(valid)
    data, seq_len = trainer.data, trainer.cell.padded_len
    return LossesSection(
        loss_sums=[local_sums.tolist()],
        loss=(loss_sums / valid.clamp(min=1)).tolist(),
        grad_norm=[float(outcome.grad_norm) for outcome in outcomes],
        valid_tokens=valid.tolist(),
        tokens_digest=[global_digest(outcome.input_digest.to(data.device)) for outcome in outcomes],
        expected_digest=[expected_digest(data, step, seq_len) for step in range(len(outcomes))],
        logged_loss=_logged_losses(outcomes, mean_of_ranks=trainer.logs_mean_of_ranks),
    )


def _recording_positions(trainer: Trainer) -> AbstractContextManager[None]:
    return trainer.position_losses.recording(trainer.cell.seq_len, parts=PARTS, boundaries=BOUNDARIES)


def collect_position_losses(trainer: Trainer) -> LossByPosition | None:
    """Return the recorded losses of all ranks by position, or None; every rank must call it."""
    sums = trainer.position_losses.sums
    if sums is None:  # on every rank, because all of them ran the same steps
        return None
    total = sums.clone()
    dist.all_reduce(total)
    means: list[float] = (total[0] / total[1]).tolist()
    counts = [int(count) for count in total[1].tolist()]
    losses = [mean if count else None for mean, count in zip(means, counts, strict=True)]
    *by_part, boundary = losses
    cell = trainer.cell
    has_shard_ends = not (cell.padding or cell.data.packs)  # else shards do not end at these positions
    return LossByPosition(
        loss=by_part, boundary_loss=boundary if has_shard_ends else None, valid_tokens=counts
    )


def _logged_losses(outcomes: Sequence[StepOutcome], *, mean_of_ranks: bool) -> list[float] | None:
    """Return the loss, or its mean over ranks, of each step as a training stack logs it; None without one."""
    local = [outcome.logged_loss for outcome in outcomes if outcome.logged_loss is not None]
    if not local:
        return None
    logged = torch.stack(local)
    if mean_of_ranks:
        dist.all_reduce(logged)
        logged = logged / dist.get_world_size()
    losses: list[float] = logged.tolist()
    return losses


def global_digest(local: Tensor) -> str:
    """Return the sum of the ranks' digests of their model inputs, in hexadecimal; every rank must call it."""
    total = local.clone()
    dist.all_reduce(total)  # an int64 sum wraps around, and so does the digest
    return _hexadecimal(total)


def expected_digest(data: StepData, step: int, seq_len: int) -> str:
    """Return the digest of a step's unsharded data, to which `global_digest` has to be equal."""
    batches = data.whole_step(step, seq_len)
    digests = [batch_digest(batch.input_ids, batch.labels, batch.position_ids) for batch in batches]
    return _hexadecimal(torch.stack(digests).sum())


def _hexadecimal(value: Tensor) -> str:
    return f"{int(value) % 2**64:016x}"


PASS = LossesPass
