"""What is wrong by one or two in a hundred, close to what bf16 rounds away: entries."""

import torch

import bench.strategies.ring.attention as ring
import bench.strategies.ulysses.attention as ulysses
from bench.attention.merge import Partial
from bench.node.worker import run_cell
from tests.fault_classes.tampering import replace_attention, wrap

FEW_ROWS = 4


def scale_scores_one_percent_too_high(job, log):
    for name in ("kernel_forward", "kernel_backward"):
        wrap(ring, name, lambda plain, *x, scale, causal: plain(*x, scale=1.01 * scale, causal=causal))
    return run_cell(job, log)


def enlarge_one_head_by_two_percent(job, log):
    def enlarged(plain, self, q, k, v, causal):
        factors = torch.ones(q.shape[1], dtype=q.dtype)
        factors[-1] = 1.02
        return plain(self, q, k, v, causal=causal) * factors[:, None, None]

    replace_attention(job, lambda *_: True, enlarged)
    return run_cell(job, log)


def exchange_in_8_bits(job, log):
    wrap(
        ulysses,
        "_exchange",
        lambda plain, parts, group: plain(parts.to(torch.float8_e4m3fn).to(parts.dtype), group),
    )
    return run_cell(job, log)


def miss_the_last_hop_in_a_few_rows(job, log):
    def merge(plain, self, rows, out, lse):
        kept = self.out[:, :, rows][:, :, :FEW_ROWS].clone(), self.lse[:, :, rows][:, :, :FEW_ROWS].clone()
        plain(self, rows, out, lse)
        self.out[:, :, rows][:, :, :FEW_ROWS] = kept[0]
        self.lse[:, :, rows][:, :, :FEW_ROWS] = kept[1]

    wrap(Partial, "merge", merge)
    return run_cell(job, log)


def enlarge_query_gradients_by_two_percent(job, log):
    replace_attention(
        job,
        lambda *_: True,
        lambda plain, self, q, k, v, causal: plain(self, q + 0.02 * (q - q.detach()), k, v, causal=causal),
    )
    return run_cell(job, log)


def drop_one_output_in_a_hundred(job, log):
    """Dropout that nobody asked for."""
    replace_attention(
        job,
        lambda *_: True,
        lambda plain, self, q, k, v, causal: torch.nn.functional.dropout(
            plain(self, q, k, v, causal=causal), p=0.01
        ),
    )
    return run_cell(job, log)
