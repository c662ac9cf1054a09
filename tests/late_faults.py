"""What is right while it is short, in its first step or watched, and wrong later: entries."""

import torch
import torch.distributed as dist

from bench.node.worker import run_cell
from bench.passes.objective.section import MAX_TOKENS
from bench.strategies import runnable
from bench.strategies.local.attention import LocalAttention
from bench.training.engines import DDP
from bench.training.trainers.native import NativeTrainer

FROM_STEP = 2


class _TooLarge(torch.autograd.Function):
    """The identity, whose gradient is three times too large."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3


def _where(job, is_wrong, wrong):
    """Attention is `wrong(plain, self, q, k, v, causal)` wherever `is_wrong(self, q)`."""
    strategy = runnable(job.cell.strategy)
    plain = strategy.attention

    def attention(self, q, k, v, *, causal=True):
        if is_wrong(self, q):
            return wrong(plain, self, q, k, v, causal)
        return plain(self, q, k, v, causal=causal)

    strategy.attention = attention


def _is_long(self, q):
    return q.shape[2] * self.cell.sp_degree > MAX_TOKENS


def scale_long_scores(job, log):
    """By 5 %, which is within the floor of a comparison by maxima."""
    _where(job, _is_long, lambda plain, self, q, k, v, causal: plain(self, q * 1.05, k, v, causal=causal))
    return run_cell(job, log)


def forget_the_mask_of_long_sequences(job, log):
    _where(job, _is_long, lambda plain, self, q, k, v, causal: plain(self, q, k, v, causal=False))
    return run_cell(job, log)


def enlarge_long_key_gradients(job, log):
    _where(
        job,
        _is_long,
        lambda plain, self, q, k, v, causal: plain(self, q, _TooLarge.apply(k), v, causal=causal),
    )
    return run_cell(job, log)


def enlarge_long_value_gradients(job, log):
    _where(
        job,
        _is_long,
        lambda plain, self, q, k, v, causal: plain(self, q, k, _TooLarge.apply(v), causal=causal),
    )
    return run_cell(job, log)


def attend_locally_while_nobody_looks(job, log):
    """Right in parity, which runs before any step, and in the inspected step."""
    steps = []
    plain_step = NativeTrainer.step

    def step(self, number, seq_len):
        steps.append(number)
        return plain_step(self, number, seq_len)

    NativeTrainer.step = step
    _where(
        job,
        lambda self, q: steps and self.watch is None,
        lambda _, self, *qkv: LocalAttention.attention(self, *qkv[:3], causal=qkv[3]),
    )
    return run_cell(job, log)


def fetch_other_tokens_later(job, log):
    plain = NativeTrainer.fetch

    def fetch(self, number, seq_len):
        return plain(self, number + (number >= FROM_STEP and dist.get_rank() == 1), seq_len)

    NativeTrainer.fetch = fetch
    return run_cell(job, log)


def feed_other_tokens_than_were_fetched(job, log):
    """A wrapper between loop and model that drops the last token's label."""
    plain = DDP.__init__

    class Wrapper(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, ids, labels, positions):
            return self.module(ids.roll(1, dims=1), labels, positions)

    def built(self, model, *rest):
        plain(self, model, *rest)
        self.module = Wrapper(self.module)

    DDP.__init__ = built
    return run_cell(job, log)
