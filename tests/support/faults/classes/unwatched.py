"""What is right only while somebody looks: faults."""

import torch

import bench.strategies.ulysses.attention as ulysses
from bench.measure.objective.section import MAX_TOKENS
from bench.measure.workloads.attention import AttentionWorkload
from bench.strategies.local.attention import LocalAttention
from tests.support.faults.classes.tampering import replace_attention, steps_begun, wrap


def _attend_locally(plain, self, q, k, v, causal):
    return LocalAttention.attention(self, q, k, v, causal=causal)


def _exchange_and_attend_locally(plain, self, q, k, v, causal):
    """All calls are made, forward and backward, and what they bring is not used."""
    exchanged = plain(self, q, k, v, causal=causal)
    return LocalAttention.attention(self, q, k, v, causal=causal) + 0 * exchanged


def _is_looked_at(self):
    """By a dispatch mode, a profiler or the harness's own watch."""
    modes = torch._C._len_torch_dispatch_stack() > 0
    return modes or torch.autograd._profiler_enabled() or self.watch is not None


def be_right_before_the_first_step_only(job):
    """In all short checks, that is."""
    begun = steps_begun()
    replace_attention(job, _exchange_and_attend_locally, lambda *_: begun)


def be_right_in_the_first_step_only(job):
    begun = steps_begun()
    replace_attention(job, _exchange_and_attend_locally, lambda *_: begun and begun[-1] > 0)


def be_right_while_looked_at_only(job):
    """In the short checks, under the watch, a dispatch mode and the profiler, with equal calls."""
    begun = steps_begun()
    replace_attention(job, _exchange_and_attend_locally, lambda self, _: begun and not _is_looked_at(self))


def exchange_while_looked_at_only(job):
    """The same, and the calls are left out."""
    begun = steps_begun()
    replace_attention(job, _attend_locally, lambda self, _: begun and not _is_looked_at(self))


def exchange_only_while_inspected(job):
    """Right in the checks of short sequences and under a dispatch mode; else nothing is sent."""

    def lazy(plain, parts, group):
        is_short = parts.shape[-2] * group.size() <= MAX_TOKENS
        is_inspected = torch._C._len_torch_dispatch_stack() > 0
        return plain(parts, group) if is_short or is_inspected else parts.contiguous()

    wrap(ulysses, "_exchange", lazy)


def attend_locally_in_timed_calls(job):
    """Where attention alone is measured: right in the parity pass and under the watch."""
    begun = []

    def step(plain, self, number):
        begun.append(number)
        return plain(self, number)

    wrap(AttentionWorkload, "step", step)
    replace_attention(job, _exchange_and_attend_locally, lambda self, _: begun and not _is_looked_at(self))
