"""Attention as the formula has it, on one device, and how far another result is from it."""

from __future__ import annotations

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


def plain_attention(inputs: Tensors, *, causal: bool) -> dict[str, Tensor]:
    """out, dq, dk and dv of `inputs` = (q, k, v, dout), each [B, heads, T, D], in their own dtype."""
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    out = masked_attention(q, k, v, visible(q.shape[2], causal=causal, device=q.device))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs[3])
    return {"out": out.detach(), "dq": dq, "dk": dk, "dv": dv}


def visible(tokens: int, *, causal: bool, device: torch.device) -> Tensor:
    """Which key (column) each query (row) may see, [T, T]."""
    everything = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    return everything.tril() if causal else everything


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask_TT: Tensor) -> Tensor:
    """Output [B, N, T, D]; KV heads are shared by consecutive query heads. Rows that see nothing are 0."""
    groups = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k, v))
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(~mask_TT, float("-inf"))
    weights = scores.softmax(dim=-1).masked_fill(~mask_TT.any(dim=-1)[:, None], 0.0)
    out: Tensor = weights @ v
    return out


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Largest deviation relative to the exact tensor's maximum; infinite where anything is not finite."""
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    return float((found.double() - exact.double()).abs().max() / exact.double().abs().max())
