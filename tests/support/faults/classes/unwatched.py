"""Faults that disappear while a check or an instrument looks at the rank."""

import torch

import bench.strategies.ulysses.attention as ulysses
from bench.measure.objective.section import MAX_TOKENS
from bench.measure.workloads.attention import AttentionWorkload
from bench.strategies.local.attention import LocalAttention
from tests.support.faults.classes.tampering import replace_attention, steps_begun, wrap


def _attend_locally(plain, self, q, k, v, causal):
    return LocalAttention.attention(self, q, k, v, causal=causal)


def _exchange_and_attend_locally(plain, self, q, k, v, causal):
    """Communicate forward and backward as usual, and do not use the received data."""
    exchanged = plain(self, q, k, v, causal=causal)
    return LocalAttention.attention(self, q, k, v, causal=causal) + 0 * exchanged


def _is_looked_at(self):
    """Return whether a dispatch mode, a profiler or the harness's own watch is active."""
    modes = torch._C._len_torch_dispatch_stack() > 0
    return modes or torch.autograd._profiler_enabled() or self.watch is not None


def be_right_before_the_first_step_only(job):
    """Be right in all short checks, and wrong in every step."""
    begun = steps_begun()
    replace_attention(job, _exchange_and_attend_locally, lambda *_: begun)


def be_right_in_the_first_step_only(job):
    begun = steps_begun()
    replace_attention(job, _exchange_and_attend_locally, lambda *_: begun and begun[-1] > 0)


def be_right_while_looked_at_only(job):
    """Be right in the short checks and under instruments; else make the same calls and ignore their data."""
    begun = steps_begun()
    replace_attention(job, _exchange_and_attend_locally, lambda self, _: begun and not _is_looked_at(self))


def exchange_while_looked_at_only(job):
    """Be right in the short checks and under instruments; else make no calls."""
    begun = steps_begun()
    replace_attention(job, _attend_locally, lambda self, _: begun and not _is_looked_at(self))


def exchange_only_while_inspected(job):
    """Be right in the short checks and under a dispatch mode; else send nothing."""

    def lazy(plain, parts, group):
        is_short = parts.shape[-2] * group.size() <= MAX_TOKENS
        is_inspected = torch._C._len_torch_dispatch_stack() > 0
        return plain(parts, group) if is_short or is_inspected else parts.contiguous()

    wrap(ulysses, "_all_to_all_single", lazy)


def attend_locally_in_timed_calls(job):
    """Be right in the parity pass and under the watch of workload=attention, and wrong in timed calls."""
    begun = []

    def step(plain, self, number):
        begun.append(number)
        return plain(self, number)

    wrap(AttentionWorkload, "step", step)
    replace_attention(job, _exchange_and_attend_locally, lambda self, _: begun and not _is_looked_at(self))
