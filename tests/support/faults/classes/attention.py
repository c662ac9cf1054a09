"""Mistakes in attention that show at any length: faults."""

from contextlib import nullcontext

import torch
import torch.distributed as dist

import bench.strategies.ulysses.attention as ulysses
from bench.attention.kernels import kernel, math
from bench.attention.merge import Partial
from bench.strategies import runnable
from bench.strategies.local.attention import LocalAttention
from bench.strategies.ring.attention import RingContext
from bench.strategies.strategy import Strategy
from tests.support.faults.classes.tampering import replace_attention, wrap


def attend_locally(job):
    """A strategy that the configuration accepts and nobody applies."""
    runnable(job.cell.strategy).attention = LocalAttention.attention


def drop_a_ring_step(job):
    """One rank's keys are never looked at, and never sent."""
    wrap(RingContext, "sources", lambda plain, self: plain(self)[:-1])


def see_one_token_too_far(job):
    """The causal triangle one diagonal too high."""

    def shifted(plain, q, k, causal, scale):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(diagonal=2)
        product = plain(q, k, False, scale)
        return product.masked_fill(mask, float("-inf")) if causal else product

    wrap(math, "_scores", shifted)


def skip_the_lse_rescale(job):
    """Partial outputs added as if each had seen all keys."""

    def added(self, rows, out, lse):
        self.out[:, :, rows] += out

    Partial.merge = added


def tile_the_kv_heads(job):
    """Heads 0 1 0 1 where 0 0 1 1 was meant: the classic mistake of GQA."""
    kernel._repeat = lambda kv, groups: kv.repeat(1, groups, 1, 1)


def sum_gradients_over_the_ranks(job):
    """Gradients come out sp_degree times too large; the forward is right."""
    extra = job.cell.sp_degree - 1

    def summed(plain, self, q, k, v, causal):
        return plain(self, *(x + extra * (x - x.detach()) for x in (q, k, v)), causal=causal)

    replace_attention(job, summed)


def fill_a_permuted_buffer(job):
    """`empty_like` of a permuted view: gloo fills it in the wrong order, forward exact, gradients not."""

    def exchange(parts, group):
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    ulysses._exchange = exchange


def forget_documents(job):
    """Positions begin anew with every document, and attention is not told where one ends."""
    Strategy.packed = lambda *_: nullcontext()
