"""How a fault is put into a rank: something of ours is replaced by what may call the plain one, or not.

A fault is a function of a rank's job; `partial(tampered, fault)` is an entry that a launcher runs.
"""

import functools

from bench.measure.objective.section import MAX_TOKENS
from bench.measure.workloads import train
from bench.run.node.worker import run_cell
from bench.strategies import runnable
from bench.training.trainers.native import NativeTrainer


def tampered(fault, job, log):
    """A rank's whole life after the fault."""
    fault(job)
    return run_cell(job, log)


def nothing(job):
    """In cells that make one of the known mistakes."""


def wrap(owner, name, wrapper):
    """`wrapper(plain, *arguments)` takes the place of a method, or of a module's function."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def wrapped(*arguments, **keywords):
        return wrapper(plain, *arguments, **keywords)

    setattr(owner, name, wrapped)


def replace_attention(job, wrong, is_wrong=lambda *_: True):
    """Attention is `wrong(plain, self, q, k, v, causal)` wherever `is_wrong(self, q)`."""

    def attention(plain, self, q, k, v, *, causal=True):
        if is_wrong(self, q):
            return wrong(plain, self, q, k, v, causal)
        return plain(self, q, k, v, causal=causal)

    wrap(runnable(job.cell.strategy), "attention", attention)


def is_long(self, q):
    """Beyond what the short checks see."""
    return q.shape[2] * self.cell.sp_degree > MAX_TOKENS


def steps_begun():
    """A list that grows by the number of each step that begins; checks before the first step add none."""
    begun = []

    def step(plain, self, number, seq_len):
        begun.append(number)
        return plain(self, number, seq_len)

    wrap(NativeTrainer, "step", step)
    return begun


def change_the_model(change):
    """Call `change` with the cell's own model with its loss, and not with float64's."""

    def built(plain, rank):
        model = plain(rank)
        change(model)
        return model

    wrap(train, "_model", built)
