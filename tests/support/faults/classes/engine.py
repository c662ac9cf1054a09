"""Faults that show only in the cell's own engine, whole model or checkpointing."""

import torch
from torch.nn.functional import dropout

from bench.training.engines.ddp.engine import DDP
from bench.training.engines.fsdp2.engine import FSDP2
from bench.training.engines.zero3.engine import Zero3
from tests.support.faults.classes.tampering import change_the_model, wrap


def keep_the_last_micro_step_only(job):
    """Let ZeRO-3 overwrite gradients of earlier micro-steps instead of adding to them."""
    is_last = []

    def micro_step(plain, self, *, last: bool):
        is_last[:] = [last]
        return plain(self, last=last)

    wrap(Zero3, "micro_step", micro_step)
    wrap(Zero3, "backward", lambda plain, self, loss: plain(self, loss * float(is_last[0])))


def enlarge_gradients_a_little(job):
    """Make all gradients 0.75 % too large, which is less than the rounding of single numbers."""
    wrap(FSDP2, "backward", lambda plain, self, loss: plain(self, 1.0075 * loss))


def enlarge_the_gradients_of_an_mlp(job):
    """Make all gradients that leave one MLP 1 % too large."""

    def forward(plain, hidden):
        out = plain(hidden)
        return out + 0.01 * (out - out.detach())

    change_the_model(lambda model: wrap(model.model.model.layers[0].mlp, "forward", forward))


def lose_the_gradient_of_a_matrix(job):
    def built(plain, self, model, layers, *words):
        def losing():
            for layer in layers:
                layer.mlp.down_proj.weight.register_hook(torch.zeros_like)
                yield layer

        plain(self, model, losing(), *words)

    wrap(Zero3, "__init__", built)


def freeze_a_matrix(job):
    """Give one matrix no gradient at all."""

    def built(plain, self, model, *words):
        model.model.model.layers[-1].mlp.down_proj.weight.requires_grad_(False)
        plain(self, model, *words)

    wrap(FSDP2, "__init__", built)


def never_reduce(job):
    """Never reduce DDP's gradients over ranks."""
    wrap(DDP, "micro_step", lambda plain, self, *, last: plain(self, last=False))


def recompute_with_dropout(job):
    """Drop a tenth of an MLP's input in the forward that checkpointing repeats, and not in the first one.

    The fault adds a constant, because torch itself rejects a dropout in the repeated graph, which saves a
    mask.
    """

    def forward(plain, hidden):
        dropped = dropout(hidden.detach(), p=0.1) - hidden.detach()
        return plain(hidden + (dropped if _is_backward() else torch.zeros_like(dropped)))

    change_the_model(lambda model: wrap(model.model.model.layers[0].mlp, "forward", forward))


def _is_backward():
    """Return whether autograd is running, for example while a checkpointed layer is computed again."""
    return torch._C._current_graph_task_id() != -1
