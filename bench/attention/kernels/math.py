"""Kernel `math`: attention by its formula, on any device and in any dtype, with all scores in memory at once.

Exponentials and logarithms are computed in float32 or wider. Rounded to bf16, the difference between a score
and the LSE would be off by a percent.
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
    """Compute the backward of FlashAttention-2 (arXiv:2307.08691, algorithm 2) without its tiling."""
    probs_BNST = torch.exp(_scores(q, k, causal, scale) - lse[..., None]).to(q.dtype)
    dprobs_BNST = torch.matmul(dout, v.transpose(-2, -1))
    delta_BNS1 = (dout * out).sum(dim=-1, keepdim=True)
    dscores_BNST = probs_BNST * (dprobs_BNST - delta_BNS1) * scale
    dq = torch.matmul(dscores_BNST, k)
    dk = torch.matmul(dscores_BNST.transpose(-2, -1), q)
    dv = torch.matmul(probs_BNST.transpose(-2, -1), dout)
    return dq, dk, dv


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Tensor:
    scores_BNST = torch.matmul(q, k.transpose(-2, -1)) * scale
    scores_BNST = scores_BNST.to(torch.promote_types(q.dtype, torch.float32))
    if not causal:
        return scores_BNST
    mask = torch.ones(scores_BNST.shape[-2:], dtype=torch.bool, device=q.device).triu(diagonal=1)
    return scores_BNST.masked_fill(mask, float("-inf"))


KERNEL = Kernel("math", _forward, _backward)
