"""Faults that make a number not finite in one place, on one rank or in one step."""

from dataclasses import replace

import torch

from bench.measure.rank_pass import Measurement
from bench.training.engines.ddp.engine import DDP
from bench.training.engines.fsdp2.engine import FSDP2
from bench.training.trainers.native import NativeTrainer
from tests.support.faults.classes.tampering import is_long, replace_attention, steps_begun, wrap

LAST_STEP = 5
"""Number of the inspected step of a cell with one warm-up step and four timed steps."""


def overflow_a_gradient_of_rank_1(job):
    """Overflow one number of one gradient in every step of the cell's own engine, before it is reduced."""

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


def overflow_the_loss_of_rank_1_in_step_1(job):
    """Overflow rank 1's reported loss of step 1."""

    def step(plain, self, number, seq_len):
        outcome = plain(self, number, seq_len)
        is_lost = number == 1 and job.rank == 1
        return replace(outcome, loss_sum=outcome.loss_sum + torch.inf) if is_lost else outcome

    wrap(NativeTrainer, "step", step)


def lose_a_parameter_everywhere(job):
    """Lose one number of a parameter in every replica, after the last step."""
    begun = steps_begun()

    def update(plain, self):
        norm = plain(self)
        if begun and begun[-1] == LAST_STEP:
            next(self.model.parameters()).data.view(-1)[0] = torch.nan
        return norm

    wrap(DDP, "update", update)


def overflow_a_gradient_later(job):
    """Overflow one number of rank 1's gradient of step 3 after the all-reduce; the loss is right."""
    begun = steps_begun()

    def backward(plain, self, loss):
        plain(self, loss)
        if begun and begun[-1] == 3 and job.rank == 1:
            next(self.model.parameters()).grad.view(-1)[0] = torch.inf

    wrap(DDP, "backward", backward)


def _after_the_last_step(change):
    """Call `change(engine)` once all steps are over."""

    def parts(plain, self):
        change(self.subject.trainer.engine)
        return plain(self)

    wrap(Measurement, "parts", parts)


def lose_a_second_moment_of_rank_1(job):
    """Overflow one number of one parameter's second moment on rank 1."""

    def lost(engine):
        if job.rank == 1:
            _, state = next(engine.optimizer_state("exp_avg_sq"))
            state.view(-1)[0] = torch.inf

    _after_the_last_step(lost)


def lose_the_momentum_everywhere(job):
    """Lose all numbers of the last parameter's momentum on every rank."""

    def lost(engine):
        *_, (_, state) = engine.optimizer_state("momentum_buffer")
        state.fill_(torch.nan)

    _after_the_last_step(lost)


def lose_a_parameter_after_all_steps(job):
    """Overflow one number of rank 0's shard after all steps, the traced steps included."""

    def lost(engine):
        if job.rank == 0:
            _, shard = next(engine.shards())
            shard.data.view(-1)[0] = -torch.inf

    _after_the_last_step(lost)


def lose_a_parameter_of_rank_1_at_load(job):
    """Lose one number of rank 1's replica once its engine has the model."""

    def built(plain, self, *words):
        plain(self, *words)
        if job.rank == 1:
            _, shard = next(self.shards())
            shard.view(-1)[0] = torch.nan

    wrap(DDP, "__init__", built)


def lose_all_gradients_of_long_sequences(job):
    """Overflow attention's output; DeepSpeed then skips the update, and its optimizer has no state."""

    def spoiled(plain, self, q, k, v, causal):
        return plain(self, q, k, v, causal=causal) + torch.inf

    replace_attention(job, spoiled, is_long)


def lose_what_follows_the_512th_token(job):
    """Lose attention's output of tokens from the 513th on, which no shorter sequence shows."""

    def spoiled(plain, self, q, k, v, causal):
        out = plain(self, q, k, v, causal=causal)
        positions = torch.arange(q.shape[2]) + self.groups.sequence_rank * q.shape[2]
        return torch.where((positions >= 512)[:, None], torch.nan, out)

    replace_attention(job, spoiled)


def _without_a_row(x):
    x = x.clone()
    x[:, -1, 2] = torch.nan
    return x


def lose_one_token_between_the_sampled_ones(job):
    """Lose one row of rank 1's output that is not compared with float64."""

    def spoiled(plain, self, q, k, v, causal):
        return _without_a_row(plain(self, q, k, v, causal=causal))

    replace_attention(job, spoiled, lambda self, q: self.groups.rank == 1 and is_long(self, q))


def _lose_a_row_of_the_value_gradient(job, *, watched):
    """Lose the row on rank 1, either under the harness's watch or without it."""

    def spoiled(plain, self, q, k, v, causal):
        v = v.view_as(v)
        v.register_hook(_without_a_row)
        return plain(self, q, k, v, causal=causal)

    def is_lost(self, q):
        return self.groups.rank == 1 and is_long(self, q) and (self.watch is not None) == watched

    replace_attention(job, spoiled, is_lost)


def lose_a_row_of_the_value_gradient_under_the_clock(job):
    _lose_a_row_of_the_value_gradient(job, watched=False)


def lose_a_row_of_the_value_gradient_while_inspected(job):
    _lose_a_row_of_the_value_gradient(job, watched=True)
