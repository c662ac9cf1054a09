"""Kernel `math`: attention by its formula, on any device and in any dtype, with all scores in memory at once.

Scores, exponentials and logarithms are computed in float32 or wider. Rounded to bf16, the difference between
a score and the LSE would be off by a percent.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.attention.kernels.kernel import Gradients, Kernel


def _forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    scores_BNST = _scores(q, k, causal, scale)
    lse_BNS = torch.logsumexp(scores_BNST, dim=-1)
    return torch.matmul(torch.exp(scores_BNST - lse_BNS[..., None]).to(v.dtype), v), lse_BNS


def _backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> Gradients:
    """Compute the backward of FlashAttention-2 (arXiv:2307.08691, algorithm 2) without its tiling.

    As in flash attention, dP and the sum of dO * O have at least float32. They may cancel, wholly so for a
    query with one key, and only their rounding would be left.
    """
    probs_BNST = torch.exp(_scores(q, k, causal, scale) - lse[..., None]).to(q.dtype)
    delta_BNS1 = (dout.to(lse.dtype) * out).sum(dim=-1, keepdim=True)
    dscores_BNST = _wide_product(dout, v).sub_(delta_BNS1).mul_(probs_BNST).mul_(scale).to(q.dtype)
    dq = torch.matmul(dscores_BNST, k)
    dk = torch.matmul(dscores_BNST.transpose(-2, -1), q)
    dv = torch.matmul(probs_BNST.transpose(-2, -1), dout)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores_BNST = _wide_product(q, k).mul_(scale)
    if not causal:
        return scores_BNST
    mask = torch.ones(scores_BNST.shape[-2:], dtype=torch.bool, device=q.device).triu(diagonal=1)
    return scores_BNST.masked_fill_(mask, float("-inf"))


def _wide_product(queries_BNSD: Tensor, keys_BNTD: Tensor) -> Tensor:
    """Return the products of all queries and keys, [B, N, S, T], in at least float32, even under autocast."""
    wide = torch.promote_types(queries_BNSD.dtype, torch.float32)
    with torch.autocast(queries_BNSD.device.type, enabled=False):
        return torch.matmul(queries_BNSD.to(wide), keys_BNTD.to(wide).transpose(-2, -1))


KERNEL = Kernel("math", _forward, _backward)
