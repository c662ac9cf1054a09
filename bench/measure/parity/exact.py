"""Attention as the formula has it, on one device and in a model, and how far another result is from it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.attention.documents import Documents
from bench.strategies.strategy import attention_replaced

CHUNK = 1024
PRODUCTS = 5
"""Matrix products of a chunk, forward and backward together: scores, out, dP, dQ with dK, and dV."""
Tensors = tuple[Tensor, ...]
PLAIN_NAME = "bench_plain_attention"
"""The name under which transformers finds plain attention."""


def plain_attention(
    inputs: Tensors, *, causal: bool, documents: Documents | None = None
) -> dict[str, Tensor]:
    """out, lse, dq, dk and dv of `inputs` = (q, k, v, dout), each [B, heads, T, D], in their own dtype.

    The LSE has a last dimension of 1, so that all five are [B, heads, T, something].
    """
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    mask = visible(q.shape[2], causal=causal, device=q.device, documents=documents)
    out = masked_attention(q, k, v, mask)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs[3])
    with torch.no_grad():
        lse = masked_scores(q, k, mask).logsumexp(dim=-1, keepdim=True)
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def visible(tokens: int, *, causal: bool, device: torch.device, documents: Documents | None = None) -> Tensor:
    """Which key (column) each query (row) may see, [T, T]; [B, 1, T, T] where sequences hold documents."""
    everything = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    if documents is not None:
        rows = [documents.of(row) for row in range(len(documents.ends))]
        numbers = [[number for number, document in enumerate(row) for _ in document] for row in rows]
        document_BT = torch.tensor(numbers, device=device)
        everything = (document_BT[:, :, None] == document_BT[:, None])[:, None]
    return everything.tril() if causal else everything


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Output [B, N, T, D]; KV heads are shared by consecutive query heads. Rows that see nothing are 0."""
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    weights = masked_scores(q, k, mask).softmax(dim=-1).masked_fill(~mask.any(dim=-1)[..., None], 0.0)
    out: Tensor = weights @ v
    return out


def masked_scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Scaled scores [B, N, T, T], minus infinity where the mask hides a key."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    masked: Tensor = scores.masked_fill(~mask, float("-inf"))
    return masked


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Largest deviation relative to the exact tensor's scale; infinite where anything is not finite."""
    error = float((found.double() - exact.double()).abs().max()) / scale_of(exact)
    return error if math.isfinite(error) else math.inf


def scale_of(exact: Tensor) -> float:
    """The largest number; 1, the size of parity's inputs, where all are 0: a lone token's gradients."""
    return float(exact.double().abs().max()) or 1.0


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


class PlainAttention:
    """Plain attention whose sums are taken in some order: all orders are equal in exact arithmetic."""

    documents: Documents | None = None
    """Of the batch that goes through the model."""
    key_parts: int = 1
    """Scores are at least float32 and weights of the values' dtype, as in flash kernels; the weighted values
    are summed in this many parts."""

    def __call__(
        self,
        module: torch.nn.Module,  # noqa: ARG002
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        mask: Tensor | None,  # noqa: ARG002
        **keywords: Any,  # noqa: ARG002
    ) -> tuple[Tensor, None]:
        q, k = q_BNSD.to(v_BKSD.dtype), k_BKSD.to(v_BKSD.dtype)
        seen = visible(q.shape[2], causal=True, device=q.device, documents=self.documents)
        wide = torch.promote_types(v_BKSD.dtype, torch.float32)
        with torch.autocast(q.device.type, enabled=False):
            weights = masked_scores(q.to(wide), k.to(wide), seen).softmax(dim=-1).to(v_BKSD.dtype)
            values = v_BKSD.repeat_interleave(q.shape[1] // v_BKSD.shape[1], dim=1)
            parts = zip(weights.chunk(self.key_parts, -1), values.chunk(self.key_parts, 2), strict=True)
            sums = torch.stack([(each @ part).to(wide) for each, part in parts]).sum(dim=0)
        return sums.to(v_BKSD.dtype).transpose(1, 2), None


@contextmanager
def plain_attention_installed() -> Iterator[PlainAttention]:
    """Let transformers find plain attention by its name for as long as the context lasts."""
    attention = PlainAttention()
    with attention_replaced(PLAIN_NAME, attention):
        yield attention
