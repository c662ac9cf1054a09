"""Mistakes in the two rings that lend or keep what others do not: faults."""

from dataclasses import replace

import torch

import bench.strategies.distflash_attn.attention as distflash
import bench.strategies.ring_self_attention.attention as rsa
from bench.strategies.distflash_attn.facts import Lent
from tests.support.faults.classes.tampering import wrap


def drop_the_last_round(job):
    """Ranks furthest from one another never meet."""
    wrap(distflash, "rounds", lambda plain, *words, **named: plain(*words, **named)[:-1])


def keep_the_gradients_of_lent_keys(job):
    """They are added to those of one's own keys: the owner's lack them. The forward is right."""

    def compute(plain, self, what, lent):
        found = plain(self, what, lent)
        if what is Lent.QUERIES:
            return found
        self.dkv += found[0]
        return (torch.zeros_like(found[0]),)

    wrap(distflash.Backward, "compute", compute)


def compute_kept_outputs_again(job):
    """Attention's output is kept, and nobody looks for it."""
    wrap(distflash.KeptOutputs, "once", lambda plain, self, compute: compute())


def leave_gradients_a_rank_from_home(job):
    """The sum over ranks stops at the one that added last."""

    def rotate(plain, tensor, group):
        arriving = plain(tensor, group)
        if tensor.dtype != torch.float32 or job.cell.dtype == "fp32":
            return arriving
        return replace(arriving, received=(tensor,))

    wrap(rsa, "rotate", rotate)


def forget_the_sum_of_a_row(job):
    """The gradient of softmax without the term that makes its rows add up to nothing."""

    def block_backward(plain, queries, keys, probs):
        dout, q, delta = queries
        return plain((dout, q, torch.zeros_like(delta)), keys, probs)

    wrap(rsa, "block_backward", block_backward)
