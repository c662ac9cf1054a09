"""Mistakes in the two rings that lend or keep what others do not: entries."""

from dataclasses import replace

import torch

import bench.strategies.distflash_attn.attention as distflash
import bench.strategies.ring_self_attention.attention as rsa
from bench.node.worker import run_cell
from bench.strategies.distflash_attn.balance import Lent
from tests.fault_classes.tampering import wrap


def forget_what_helpers_found(job, log):
    """Of the keys that another rank computed with, queries see nothing."""
    wrap(distflash.Forward, "take_back", lambda plain, self, what, found: None)
    return run_cell(job, log)


def drop_the_last_round(job, log):
    """Ranks furthest from one another never meet."""
    wrap(distflash, "rounds", lambda plain, *words, **named: plain(*words, **named)[:-1])
    return run_cell(job, log)


def help_with_ones_own_queries(job, log):
    """What a helper gives back is of its own queries."""

    def compute(plain, self, what, lent):
        return plain(self, what, (self.q,) if what is Lent.QUERIES else lent)

    wrap(distflash.Forward, "compute", compute)
    return run_cell(job, log)


def keep_the_gradients_of_lent_keys(job, log):
    """They are added to those of one's own keys: the owner's lack them. The forward is right."""

    def compute(plain, self, what, lent):
        found = plain(self, what, lent)
        if what is Lent.QUERIES:
            return found
        self.dkv += found[0]
        return (torch.zeros_like(found[0]),)

    wrap(distflash.Backward, "compute", compute)
    return run_cell(job, log)


def give_back_without_gradients_of_queries(job, log):
    """What a helper found for another's queries is lost in backward alone."""

    def take_back(plain, self, what, found):
        if what is Lent.KEYS:
            plain(self, what, found)

    wrap(distflash.Backward, "take_back", take_back)
    return run_cell(job, log)


def compute_kept_outputs_again(job, log):
    """Attention's output is kept, and nobody looks for it."""
    wrap(distflash.KeptOutputs, "once", lambda plain, self, compute: compute())
    return run_cell(job, log)


def use_ones_own_values_all_the_way(job, log):
    """Keys and values arrive, and are passed on, and are never looked at."""

    def round_trip(plain, tensor, ring):
        return ((source, tensor) for source, _ in plain(tensor, ring))

    wrap(rsa, "round_trip", round_trip)
    return run_cell(job, log)


def see_later_keys_of_a_block(job, log):
    """No mask on blocks of which queries see a part."""
    wrap(rsa, "_masked", lambda plain, scores: scores)
    return run_cell(job, log)


def leave_gradients_a_rank_from_home(job, log):
    """The sum over ranks stops at the one that added last."""

    def rotate(plain, tensor, group):
        arriving = plain(tensor, group)
        if tensor.dtype != torch.float32 or job.cell.dtype == "fp32":
            return arriving
        return replace(arriving, handed=replace(arriving.handed, received=(tensor,)))

    wrap(rsa, "rotate", rotate)
    return run_cell(job, log)


def forget_the_sum_of_a_row(job, log):
    """The gradient of softmax without the term that makes its rows add up to nothing."""

    def block_backward(plain, queries, keys, probs):
        dout, q, delta = queries
        return plain((dout, q, torch.zeros_like(delta)), keys, probs)

    wrap(rsa, "block_backward", block_backward)
    return run_cell(job, log)
