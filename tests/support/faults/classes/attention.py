"""Faults in attention that show at any length."""

from contextlib import nullcontext

import torch
import torch.distributed as dist

import bench.strategies.ulysses.attention as ulysses
from bench.attention.kernels import kernel, math
from bench.attention.merge import Partial
from bench.strategies import load_strategy_class
from bench.strategies.local.attention import LocalAttention
from bench.strategies.ring.attention import RingContext
from bench.strategies.strategy import Strategy
from tests.support.faults.classes.tampering import replace_attention, wrap


def attend_locally(job):
    """Make every rank attend to its own shard only, as if an accepted strategy were not applied."""
    load_strategy_class(job.cell.strategy).attention = LocalAttention.attention


def drop_a_ring_step(job):
    """Leave out the last ring step, so that one rank's keys are neither sent nor used."""
    wrap(RingContext, "sources", lambda plain, self: plain(self)[:-1])


def see_one_token_too_far(job):
    """Shift the causal mask by one diagonal, so that each token sees its successor."""

    def shifted(plain, q, k, causal, scale):
        mask = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(diagonal=2)
        product = plain(q, k, False, scale)
        return product.masked_fill(mask, float("-inf")) if causal else product

    wrap(math, "_scores", shifted)


def skip_the_lse_rescale(job):
    """Add partial outputs as if each of them had seen all keys."""

    def added(self, rows, out, lse):
        self.out[:, :, rows] += out

    Partial.merge = added


def tile_the_kv_heads(job):
    """Repeat KV heads as 0 1 0 1 instead of 0 0 1 1, the classic mistake of GQA."""
    kernel._repeat_heads = lambda kv, repeats: kv.repeat(1, repeats, 1, 1)


def sum_gradients_over_the_ranks(job):
    """Make gradients sp_degree times too large; the forward is right."""
    extra = job.cell.sp_degree - 1

    def summed(plain, self, q, k, v, causal):
        return plain(self, *(x + extra * (x - x.detach()) for x in (q, k, v)), causal=causal)

    replace_attention(job, summed)


def fill_a_permuted_buffer(job):
    """Receive into `empty_like` of a permuted view, which gloo fills in the wrong order.

    The forward is exact, the gradients are not.
    """

    def exchange(parts, group):
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts.contiguous(), group=group)
        return received

    ulysses._all_to_all_single = exchange


def forget_documents(job):
    """Withhold the documents from attention, although positions restart in every document."""
    Strategy.use_documents = lambda *_: nullcontext()
