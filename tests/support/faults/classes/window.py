"""Faults that keep work out of the timed steps, or do other work in them."""

import torch

import bench.strategies.ulysses.attention as ulysses
from bench.measure.workloads.attention import AttentionWorkload
from bench.strategies.local.attention import LocalAttention
from bench.training.trainers.native import NativeTrainer
from bench.training.trainers.trainer import StepOutcome
from tests.support.faults.classes.tampering import is_long, replace_attention, steps_begun, wrap


def _queue(owner, placeholder, fill):
    """Queue the second and later calls of `owner.step`, and run them all before a watched one."""
    queued = []

    def step(plain, self, number, *words):
        if number == 0 or self.strategy.watch is not None:
            for result, arguments in queued:
                fill(result, plain(self, *arguments))
            queued.clear()
            return plain(self, number, *words)
        queued.append((placeholder(self), (number, *words)))
        return queued[-1][0]

    wrap(owner, "step", step)


def queue_steps_until_inspected(job):
    """Run the timed training steps just before the inspected step."""

    def placeholder(_):
        floats, integers = (torch.zeros((), dtype=dtype) for dtype in (torch.float32, torch.int64))
        return StepOutcome(floats, integers, floats.clone(), integers.clone())

    def fill(result, outcome):
        for name in ("loss_sum", "valid_tokens", "grad_norm", "input_digest"):
            getattr(result, name).copy_(getattr(outcome, name))

    _queue(NativeTrainer, placeholder, fill)


def queue_calls_until_inspected(job):
    """Run the timed calls of attention alone just before the inspected call."""
    begun = []

    def step(plain, self, number):
        if begun and number and self.strategy.watch is None:
            clock = type(begun[0])(self.device)
            for _ in range(3):
                clock.mark()
            return clock
        begun.append(plain(self, number))
        return begun[-1]

    wrap(AttentionWorkload, "step", step)


def _keep_results(job, *, by_input):
    """Communicate as usual, and return an earlier call's result: the last one, or that of the same input."""
    kept = {}

    def attention(plain, self, q, k, v, causal):
        key = q.data_ptr() if by_input else None
        if key not in kept:
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            with torch.enable_grad():
                out = plain(self, *leaves, causal=causal)
            kept[key] = leaves, out
            q, k, v = (x.view_as(x) for x in (q, k, v))
            return plain(self, q, k, v, causal=causal)
        return _Replayed.apply(q, k, v, kept[key], self.groups.ulysses)

    replace_attention(job, attention, lambda self, q: is_long(self, q) and self.watch is None)


class _Replayed(torch.autograd.Function):
    """The all-to-all calls of Ulysses, with the result and the gradients of a kept call."""

    @staticmethod
    def forward(ctx, q, k, v, kept, group):
        ctx.kept, ctx.group = kept, group
        *_, whole = ulysses.gather_seq_scatter_heads(q, k, v, group)
        ulysses.gather_heads_scatter_seq(whole.repeat_interleave(q.shape[1] // k.shape[1], 1), group)
        return kept[1].detach().clone()

    @staticmethod
    def backward(ctx, grad):
        leaves, out = ctx.kept
        gradients = torch.autograd.grad(out, leaves, grad, retain_graph=True)
        return *gradients, None, None


def return_the_last_result(job):
    _keep_results(job, by_input=False)


def _attend_locally(plain, self, q, k, v, causal):
    exchanged = plain(self, q, k, v, causal=causal)
    return LocalAttention.attention(self, q, k, v, causal=causal) + 0 * exchanged


def attend_locally_from_the_second_step(job):
    """Communicate as usual, and from the second full-length step on use the rank's own shard alone."""
    begun = steps_begun()
    wrong = lambda self, q: is_long(self, q) and (begun or [0])[-1] > 0 and self.watch is None  # noqa: E731
    replace_attention(job, _attend_locally, wrong)
