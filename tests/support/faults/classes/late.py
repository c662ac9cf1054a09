"""Faults that begin after the first step, or that are in the optimizer."""

import torch
from torch import nn

from bench.config import OptimizerConfig
from bench.training.engines.ddp.engine import DDP
from bench.training.engines.zero3.engine import Zero3
from bench.training.trainers.native import NativeTrainer
from tests.support.faults.classes.tampering import steps_begun, wrap

FROM_STEP = 2


def repeat_a_step_later(job):
    """Train on the tokens of step 1 in all later steps, on all ranks."""
    wrap(NativeTrainer, "fetch", lambda plain, self, number, seq_len: plain(self, min(number, 1), seq_len))


def skip_the_update_of_rank_1(job):
    def update(plain, self):
        if job.rank == 1:
            _set_learning_rate(self.engine.optimizer.optimizer, 0.0)
        return plain(self)

    wrap(Zero3, "update", update)


def learn_twice_as_fast_later(job):
    begun = steps_begun()

    def update(plain, self):
        if begun and begun[-1] >= FROM_STEP:
            _set_learning_rate(self.updater.optimizer, 2 * OptimizerConfig().learning_rate)
        return plain(self)

    wrap(DDP, "update", update)


def drift_apart(job):
    """Give rank 1's replica a slightly larger learning rate."""

    def built(plain, self, *words):
        plain(self, *words)
        rate = OptimizerConfig().learning_rate * (1 + job.rank / 100)
        _set_learning_rate(self.updater.optimizer, rate)
        self.updater.schedule.base_lrs = [rate]

    wrap(DDP, "__init__", built)


def clip_by_the_ranks_own_norm(job):
    """Clip by the norm of a rank's own shards instead of the whole norm."""

    def clip(_, parameters, max_norm):
        shards = [p.grad.to_local() for p in parameters if p.grad is not None]
        norm = torch.stack([shard.norm() for shard in shards]).norm()
        for shard in shards:
            shard.mul_((max_norm / norm).clamp(max=1))
        return norm

    wrap(nn.utils, "clip_grad_norm_", clip)


def never_clip(job):
    """Never clip gradients; losses hardly change, because Adam divides by the gradient's size."""

    wrap(nn.utils, "clip_grad_norm_", lambda plain, parameters, _: plain(parameters, torch.inf))


def undo_one_update(job):
    """Undo the update of step 2 on all ranks, and no other update."""
    begun = steps_begun()

    def update(plain, self):
        if begun and begun[-1] == FROM_STEP:
            kept = [p.detach().clone() for p in self.model.parameters()]
            norm = plain(self)
            with torch.no_grad():
                for parameter, before in zip(self.model.parameters(), kept, strict=True):
                    parameter.copy_(before)
            return norm
        return plain(self)

    wrap(DDP, "update", update)


def _set_learning_rate(optimizer, rate):
    for group in optimizer.param_groups:
        group["lr"] = rate
