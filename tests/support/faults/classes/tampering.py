"""Helpers that put a fault into a rank by replacing a function, which the replacement may still call.

A fault is a function of a rank's job. The launcher runs `partial(tampered, fault)` as the rank's entry point.
"""

import functools

from bench.measure.objective.section import MAX_TOKENS
from bench.measure.workloads import train
from bench.run.node.worker import run_cell
from bench.strategies import load_strategy_class
from bench.training.trainers.native import NativeTrainer


def run_with_fault(fault, job, log):
    """Put the fault into this rank, then run its cell."""
    fault(job)
    return run_cell(job, log)


def no_fault(job):
    """Put in no fault, for cells that already make a known mistake."""


def wrap(owner, name, wrapper):
    """Replace a method, or a module's function, by `wrapper(plain, *arguments)`."""
    plain = getattr(owner, name)

    @functools.wraps(plain)
    def wrapped(*arguments, **keywords):
        return wrapper(plain, *arguments, **keywords)

    setattr(owner, name, wrapped)


def replace_attention(job, wrong, is_wrong=lambda *_: True):
    """Replace attention by `wrong(plain, self, q, k, v, causal)` wherever `is_wrong(self, q)` is true."""

    def attention(plain, self, q, k, v, *, causal=True):
        if is_wrong(self, q):
            return wrong(plain, self, q, k, v, causal)
        return plain(self, q, k, v, causal=causal)

    wrap(load_strategy_class(job.cell.strategy), "attention", attention)


def is_long(self, q):
    """Return whether the sequence is longer than those of the short checks."""
    return q.shape[2] * self.cell.sp_degree > MAX_TOKENS


def steps_begun():
    """Return a list that receives the number of each step that begins; early checks add none."""
    begun = []

    def step(plain, self, number, seq_len):
        begun.append(number)
        return plain(self, number, seq_len)

    wrap(NativeTrainer, "step", step)
    return begun


def change_the_model(change):
    """Call `change` with the cell's own model and its loss; the float64 model is not changed."""

    def built(plain, rank):
        model = plain(rank)
        change(model)
        return model

    wrap(train, "_model", built)
