"""Numbers that are not finite, in one place, on one rank or in one step: entries."""

from dataclasses import replace

import torch

from bench.node.worker import run_cell
from bench.passes.parity.section import MAX_TOKENS
from bench.passes.rank_pass import Measurement
from bench.training.engines import DDP, FSDP2
from bench.training.trainers.native import NativeTrainer
from tests.fault_classes.tampering import replace_attention, steps_begun, wrap

LAST_STEP = 5
"""Of a cell with one warm-up step and four timed ones: the inspected one."""


def overflow_a_gradient_of_rank_1(job, log):
    """One number of one gradient, in every step of the cell's own engine, before it is reduced."""

    def built(plain, self, model, *words):
        def overflown(gradient):
            gradient = gradient.clone()
            gradient.view(-1)[0] = torch.inf if job.rank == 1 else gradient.view(-1)[0]
            return gradient

        plain(self, model, *words)
        next(self.module.parameters()).register_post_accumulate_grad_hook(
            lambda p: p.grad.to_local().copy_(overflown(p.grad.to_local()))
        )

    wrap(FSDP2, "__init__", built)
    return run_cell(job, log)


def overflow_the_loss_of_rank_1_in_step_1(job, log):
    """Reported and trained on."""

    def step(plain, self, number, seq_len):
        outcome = plain(self, number, seq_len)
        is_lost = number == 1 and job.rank == 1
        return replace(outcome, loss_sum=outcome.loss_sum + torch.inf) if is_lost else outcome

    wrap(NativeTrainer, "step", step)
    return run_cell(job, log)


def lose_a_parameter_in_the_last_step(job, log):
    """One number of one replica, after the last gradient was taken."""
    begun = steps_begun()

    def update(plain, self):
        norm = plain(self)
        if begun and begun[-1] == LAST_STEP and job.rank == 1:
            next(self.model.parameters()).data.view(-1)[0] = torch.nan
        return norm

    wrap(DDP, "update", update)
    return run_cell(job, log)


def lose_a_parameter_everywhere(job, log):
    """The same number of every replica."""
    begun = steps_begun()

    def update(plain, self):
        norm = plain(self)
        if begun and begun[-1] == LAST_STEP:
            next(self.model.parameters()).data.view(-1)[0] = torch.nan
        return norm

    wrap(DDP, "update", update)
    return run_cell(job, log)


def overflow_a_gradient_later(job, log):
    """One number of rank 1's gradient of step 3, after ranks have met; its loss is right."""
    begun = steps_begun()

    def backward(plain, self, loss):
        plain(self, loss)
        if begun and begun[-1] == 3 and job.rank == 1:
            next(self.model.parameters()).grad.view(-1)[0] = torch.inf

    wrap(DDP, "backward", backward)
    return run_cell(job, log)


def _after_the_last_step(change):
    """`change(engine)` once all steps are over."""

    def taken(plain, self):
        change(self.subject.trainer.engine)
        return plain(self)

    wrap(Measurement, "parts", taken)


def lose_a_second_moment_of_rank_1(job, log):
    """One number that the optimizer keeps of one parameter."""

    def lost(engine):
        if job.rank == 1:
            _, state = next(engine.optimizer_state("exp_avg_sq"))
            state.view(-1)[0] = torch.inf

    _after_the_last_step(lost)
    return run_cell(job, log)


def lose_the_momentum_everywhere(job, log):
    """All numbers of the last parameter, on every rank."""

    def lost(engine):
        *_, (_, state) = engine.optimizer_state("momentum_buffer")
        state.fill_(torch.nan)

    _after_the_last_step(lost)
    return run_cell(job, log)


def lose_a_parameter_after_all_steps(job, log):
    """One number of rank 0's shard, after the traced steps too."""

    def lost(engine):
        if job.rank == 0:
            _, shard = next(engine.shards())
            shard.data.view(-1)[0] = -torch.inf

    _after_the_last_step(lost)
    return run_cell(job, log)


def _at_load(job, log, engine, rank):
    """One number of one parameter, once an engine has the model."""

    def built(plain, self, *words):
        plain(self, *words)
        if job.rank == rank:
            _, shard = next(self.shards())
            shard.view(-1)[0] = torch.nan

    wrap(engine, "__init__", built)
    return run_cell(job, log)


def lose_a_parameter_of_rank_1_at_load(job, log):
    """Of one replica."""
    return _at_load(job, log, DDP, 1)


def lose_a_shard_of_rank_0_at_load(job, log):
    return _at_load(job, log, FSDP2, 0)


def lose_all_gradients_of_long_sequences(job, log):
    """By an output that overflows; DeepSpeed then updates nothing, and its optimizer has no state."""

    def spoiled(plain, self, q, k, v, causal):
        return plain(self, q, k, v, causal=causal) + torch.inf

    replace_attention(job, lambda self, q: q.shape[2] * self.cell.sp_degree > MAX_TOKENS, spoiled)
    return run_cell(job, log)
