"""Numbers that are not finite, in one place, on one rank or in one step: entries."""

from dataclasses import replace

import torch

from bench.node.worker import run_cell
from bench.training.engines import DDP, FSDP2
from bench.training.trainers.native import NativeTrainer
from tests.fault_classes.tampering import steps_begun, wrap

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
