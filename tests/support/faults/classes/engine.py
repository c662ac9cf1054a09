"""What is wrong only in the cell's own engine, whole model or checkpointing: faults."""

import torch
from torch.nn.functional import dropout

from bench.training.engines.ddp.engine import DDP
from bench.training.engines.fsdp2.engine import FSDP2
from bench.training.engines.zero3.engine import Zero3
from tests.support.faults.classes.tampering import change_the_model, wrap


def keep_the_last_micro_step_only(job):
    """ZeRO-3 that overwrites gradients where it should add them up."""
    last = []

    def micro_step(plain, self, *, last: bool, seen=last):
        seen[:] = [last]
        return plain(self, last=last)

    wrap(Zero3, "micro_step", micro_step)
    wrap(Zero3, "backward", lambda plain, self, loss: plain(self, loss * float(last[0])))


def enlarge_gradients_a_little(job):
    """All by the same 0.75 %, which is less than what rounding does to single numbers."""
    wrap(FSDP2, "backward", lambda plain, self, loss: plain(self, 1.0075 * loss))


def lose_the_gradient_of_a_matrix(job):
    def built(plain, self, model, layers, *words):
        def losing():
            for layer in layers:
                layer.mlp.down_proj.weight.register_hook(torch.zeros_like)
                yield layer

        plain(self, model, losing(), *words)

    wrap(Zero3, "__init__", built)


def freeze_a_matrix(job):
    """It has no gradient at all."""

    def built(plain, self, model, *words):
        model.model.model.layers[-1].mlp.down_proj.weight.requires_grad_(False)
        plain(self, model, *words)

    wrap(FSDP2, "__init__", built)


def never_reduce(job):
    """Every rank of a DDP that never meets the others."""
    wrap(DDP, "micro_step", lambda plain, self, *, last: plain(self, last=False))


def recompute_with_dropout(job):
    """Checkpointing whose second forward drops a tenth of an MLP's input, which the first one kept.

    As a sum with a constant: a dropout in the graph torch itself refuses, as it saves a mask.
    """

    def forward(plain, hidden):
        dropped = dropout(hidden.detach(), p=0.1) - hidden.detach()
        return plain(hidden + (dropped if _is_backward() else torch.zeros_like(dropped)))

    change_the_model(lambda model: wrap(model.model.model.layers[0].mlp, "forward", forward))


def _is_backward():
    """Whether autograd is at work, as when a checkpointed layer is computed again."""
    return torch._C._current_graph_task_id() != -1
