"""Faults in the strategies distflash_attn and ring_self_attention."""

from dataclasses import replace

import torch

import bench.strategies.distflash_attn.attention as distflash
import bench.strategies.ring_self_attention.attention as rsa
from bench.strategies.distflash_attn.facts import Operand
from tests.support.faults.classes.tampering import wrap


def drop_the_last_round(job):
    """Leave out the last round, in which the ranks furthest from one another communicate."""
    wrap(distflash, "rounds", lambda plain, *words, **named: plain(*words, **named)[:-1])


def keep_the_gradients_of_lent_keys(job):
    """Add the gradients of lent keys to this rank's keys instead of the owner's. The forward is right."""

    def compute(plain, self, what, lent):
        gradients = plain(self, what, lent)
        if what is Operand.QUERIES:
            return gradients
        self.dkv += gradients[0]
        return (torch.zeros_like(gradients[0]),)

    wrap(distflash.BalancedBackward, "compute", compute)


def compute_kept_outputs_again(job):
    """Keep attention's output for checkpointing, and compute it again all the same."""
    wrap(distflash.SavedOutputs, "get_or_compute", lambda plain, self, compute: compute())


def leave_gradients_a_rank_from_home(job):
    """Leave the sum of key gradients at the rank that added last, one rank before its owner."""

    def rotate(plain, tensor, group):
        arriving = plain(tensor, group)
        if tensor.dtype != torch.float32 or job.cell.dtype == "fp32":
            return arriving
        return replace(arriving, received=(tensor,))

    wrap(rsa, "rotate", rotate)


def forget_the_sum_of_a_row(job):
    """Leave out the term of softmax's gradient that makes its rows sum to 0."""

    def block_backward(plain, queries, keys, probs):
        dout, q, delta = queries
        return plain((dout, q, torch.zeros_like(delta)), keys, probs)

    wrap(rsa, "block_backward", block_backward)
