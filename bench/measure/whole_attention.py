"""Causal attention of whole sequences in chunks of queries: exact, and never its square at once."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

CHUNK = 1024
PRODUCTS = 5
"""Matrix products of a chunk, forward and backward together: scores, out, dP, dQ with dK, and dV."""


def whole_attention(
    q_NTD: Tensor, k_TD: Tensor, v_TD: Tensor, dout_NTD: Tensor, scale: float, dtype: torch.dtype
) -> Mapping[str, Tensor]:
    """out, dq [N, T, D], dk and dv [T, D] of the query heads that share one KV head, computed in `dtype`.

    The gradients of K and V are added up in at least float32. dS = P * (dP - (dout . out)), as flash
    attention has it (arXiv:2205.14135, appendix B.2).
    """
    q, k, v, dout = (x.to(dtype) for x in (q_NTD, k_TD, v_TD, dout_NTD))
    sums = torch.promote_types(dtype, torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=sums) for x in (k, v))
    out, dq = torch.empty_like(q), torch.empty_like(q)
    for start in range(0, q.shape[1], CHUNK):
        rows = slice(start, min(start + CHUNK, q.shape[1]))
        keys, values = k[: rows.stop], v[: rows.stop]
        hidden = (
            torch.arange(rows.stop, device=q.device)
            > torch.arange(start, rows.stop, device=q.device)[:, None]
        )
        probs = (q[:, rows] @ keys.T * scale).masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[:, rows] = probs @ values
        delta = (dout[:, rows] * out[:, rows]).sum(dim=-1, keepdim=True)
        dscores = probs * (dout[:, rows] @ values.T - delta) * scale
        dq[:, rows] = dscores @ keys
        dk[: rows.stop] += (dscores.transpose(1, 2) @ q[:, rows]).to(sums).sum(dim=0)
        dv[: rows.stop] += (probs.transpose(1, 2) @ dout[:, rows]).to(sums).sum(dim=0)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def whole_attention_flops(queries: int, tokens: int, head_dim: int) -> int:
    """Operations of one call with this many query heads."""
    return PRODUCTS * queries * tokens * (tokens + 1) * head_dim
