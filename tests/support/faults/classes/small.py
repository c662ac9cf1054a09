"""Faults of one or two percent, close to the rounding of bf16."""

import torch

import bench.strategies.ring.attention as ring
import bench.strategies.ulysses.attention as ulysses
from bench.attention.merge import Partial
from tests.support.faults.classes.tampering import replace_attention, wrap

FEW_ROWS = 4


def scale_scores_one_percent_too_high(job):
    for name in ("kernel_forward", "kernel_backward"):
        wrap(ring, name, lambda plain, *x, scale, causal: plain(*x, scale=1.01 * scale, causal=causal))


def enlarge_one_head_by_two_percent(job):
    def enlarged(plain, self, q, k, v, causal):
        factors = torch.ones(q.shape[1], dtype=q.dtype)
        factors[-1] = 1.02
        return plain(self, q, k, v, causal=causal) * factors[:, None, None]

    replace_attention(job, enlarged)


def exchange_in_8_bits(job):
    wrap(
        ulysses,
        "_all_to_all_single",
        lambda plain, parts, group: plain(parts.to(torch.float8_e4m3fn).to(parts.dtype), group),
    )


def miss_the_last_hop_in_a_few_rows(job):
    def merge(plain, self, rows, out, lse):
        before = self.out[:, :, rows][:, :, :FEW_ROWS].clone(), self.lse[:, :, rows][:, :, :FEW_ROWS].clone()
        plain(self, rows, out, lse)
        self.out[:, :, rows][:, :, :FEW_ROWS] = before[0]
        self.lse[:, :, rows][:, :, :FEW_ROWS] = before[1]

    wrap(Partial, "merge", merge)


def enlarge_query_gradients_by_two_percent(job):
    def enlarged(plain, self, q, k, v, causal):
        return plain(self, q + 0.02 * (q - q.detach()), k, v, causal=causal)

    replace_attention(job, enlarged)


def drop_one_output_in_a_hundred(job):
    """Apply dropout that the configuration does not ask for."""

    def dropped(plain, self, q, k, v, causal):
        return torch.nn.functional.dropout(plain(self, q, k, v, causal=causal), p=0.01)

    replace_attention(job, dropped)
