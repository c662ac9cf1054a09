"""Single rows of attention: output and query gradient of some tokens of a long sequence."""

from __future__ import annotations

import torch
from torch import Tensor


def rows(
    q_BRD: Tensor,
    k_BTD: Tensor,
    v_BTD: Tensor,
    dout_BRD: Tensor,
    hidden: Tensor,
    scale: float,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Output and gradient of some queries of one head: dq = P * (dP - (dout . out)) K * scale.

    In less than float64 as a sound kernel has them: products of this dtype, sums in at least float32, weights
    and their gradients rounded before each product, as flash attention does (arXiv:2205.14135, appendix B.2).
    `hidden` says which keys a row may not see, [R, T] or [B, R, T]; the scale is that of the scores.
    """
    wide = torch.promote_types(dtype, torch.float32)

    def narrow(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    q, k, v, dout = (x.to(wide) for x in (q_BRD, k_BTD, v_BTD, dout_BRD))
    scores_BRT = (q @ k.transpose(1, 2) * scale).masked_fill(hidden, float("-inf"))
    probs_BRT = scores_BRT.softmax(dim=-1)
    out_BRD = narrow(narrow(probs_BRT) @ v)
    delta = (dout * out_BRD).sum(dim=-1, keepdim=True)
    dscores_BRT = probs_BRT * (dout @ v.transpose(1, 2) - delta)
    return out_BRD, narrow(narrow(dscores_BRT) @ k * scale)
