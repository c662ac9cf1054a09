"""Plain attention, which is computed with all scores on one device, alone and in a model; errors against it.

Shapes: B sequences, N query heads, K KV heads, T or S tokens of whole sequences, D head size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.attention.documents import Documents
from bench.strategies.strategy import register_attention

CHUNK = 1024
"""Number of queries whose scores exist at once in `whole_attention`."""
PRODUCTS = 5
"""Number of matrix products of a chunk in `whole_attention`: scores, out, dP, dQ with dK, and dV."""
Tensors = tuple[Tensor, ...]
PLAIN_NAME = "bench_plain_attention"
"""Name under which plain attention is registered in transformers."""


def plain_attention(
    inputs: Tensors, *, causal: bool, documents: Documents | None = None
) -> dict[str, Tensor]:
    """Return `out`, `lse`, `dq`, `dk` and `dv` of plain attention, computed in the dtype of `inputs`.

    `inputs` are q, k, v and dout, [B, heads, T, D]. `lse` is [B, heads, T, 1], so that all results have four
    dimensions.
    """
    q, k, v = (x.clone().requires_grad_() for x in inputs[:3])
    mask = visible_keys(q.shape[2], causal=causal, device=q.device, documents=documents)
    out = masked_attention(q, k, v, mask)
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), inputs[3])
    with torch.no_grad():
        lse = masked_scores(q, k, mask).logsumexp(dim=-1, keepdim=True)
    return {"out": out.detach(), "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def visible_keys(
    tokens: int, *, causal: bool, device: torch.device, documents: Documents | None = None
) -> Tensor:
    """Return a mask, True where a query (row) may see a key (column), [T, T]; with documents [B, 1, T, T]."""
    mask = torch.ones(tokens, tokens, dtype=torch.bool, device=device)
    if documents is not None:
        rows = [documents.positions_of(row) for row in range(len(documents.ends))]
        numbers = [[number for number, document in enumerate(row) for _ in document] for row in rows]
        document_BT = torch.tensor(numbers, device=device)
        mask = (document_BT[:, :, None] == document_BT[:, None])[:, None]
    return mask.tril() if causal else mask


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Return attention's output, [B, N, T, D]; a query that sees no key has an output of 0.

    Consecutive query heads share a KV head.
    """
    v = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    weights = masked_scores(q, k, mask).softmax(dim=-1).masked_fill(~mask.any(dim=-1)[..., None], 0.0)
    out: Tensor = weights @ v
    return out


def masked_scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    """Return scaled scores, [B, N, T, T], with minus infinity for keys that the mask hides."""
    k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    masked: Tensor = scores.masked_fill(~mask, float("-inf"))
    return masked


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Return the largest deviation, divided by the largest exact number; infinite if it is not finite."""
    error = float((result.double() - exact.double()).abs().max()) / scale_of(exact)
    return error if math.isfinite(error) else math.inf


def scale_of(exact: Tensor) -> float:
    """Return the largest absolute number of a tensor, or 1 if all numbers are 0.

    The inputs of the parity pass have about size 1. Gradients of a sequence of one token are 0.
    """
    return float(exact.double().abs().max()) or 1.0


def whole_attention(
    q_NTD: Tensor,
    k_TD: Tensor,
    v_TD: Tensor,
    dout_NTD: Tensor,
    scale: float,
    dtype: torch.dtype,
    first_keys_T: Tensor | None = None,
) -> Mapping[str, Tensor]:
    """Return `out`, `dq`, `dk` and `dv` of causal attention, computed in `dtype`.

    A query sees no key before its first key, which is key 0 by default.

    The N query heads share one KV head. `out` and `dq` are [N, T, D], `dk` and `dv` [T, D]. Gradients of K
    and V are summed in at least float32. dS = P * (dP - (dout . out)), as in flash attention
    (arXiv:2205.14135, appendix B.2).
    """
    q, k, v, dout = (x.to(dtype) for x in (q_NTD, k_TD, v_TD, dout_NTD))
    sum_dtype = torch.promote_types(dtype, torch.float32)
    dk, dv = (torch.zeros_like(x, dtype=sum_dtype) for x in (k, v))
    out, dq = torch.empty_like(q), torch.empty_like(q)
    for start in range(0, q.shape[1], CHUNK):
        rows = slice(start, min(start + CHUNK, q.shape[1]))
        keys, values = k[: rows.stop], v[: rows.stop]
        positions = torch.arange(rows.stop, device=q.device)
        hidden = positions > positions[start:, None]
        if first_keys_T is not None:
            hidden |= positions < first_keys_T[rows, None]
        probs = (q[:, rows] @ keys.T * scale).masked_fill(hidden, float("-inf")).softmax(dim=-1)
        out[:, rows] = probs @ values
        delta = (dout[:, rows] * out[:, rows]).sum(dim=-1, keepdim=True)
        dscores = probs * (dout[:, rows] @ values.T - delta) * scale
        dq[:, rows] = dscores @ keys
        dk[: rows.stop] += (dscores.transpose(1, 2) @ q[:, rows]).to(sum_dtype).sum(dim=0)
        dv[: rows.stop] += (probs.transpose(1, 2) @ dout[:, rows]).to(sum_dtype).sum(dim=0)
    return {"out": out, "dq": dq, "dk": dk, "dv": dv}


def whole_attention_flops(queries: int, tokens: int, head_dim: int) -> int:
    """Return the FLOPs of one call of `whole_attention` with `queries` query heads."""
    return PRODUCTS * queries * tokens * (tokens + 1) * head_dim


@dataclass(frozen=True, slots=True)
class AttentionRounding:
    """Choice of how plain attention rounds. The results of all choices are equal in exact arithmetic."""

    key_parts: int = 1
    """Number of parts of the keys. Weighted values are summed in each part, and then over the parts."""
    rounds_scores: bool = False
    """Whether scores are rounded to the dtype of the values, as in attention without a kernel. Else they have
    at least float32, as in flash kernels."""


class PlainAttention:
    """Plain causal attention for a model in transformers, whose weights have the dtype of the values.

    Its backward reads the rounded output, as that of flash attention does: dS = P * (dP - dO . O)
    (arXiv:2205.14135, appendix B.2). Where dP and dO . O cancel, only their rounding is left.
    """

    documents: Documents | None = None
    """Documents of the batch that goes through the model; None without packing."""
    rounding: AttentionRounding = AttentionRounding()
    """Rounding of the calls that follow."""

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
        visible = visible_keys(q.shape[2], causal=True, device=q.device, documents=self.documents)
        sum_dtype = torch.promote_types(v_BKSD.dtype, torch.float32)
        score_dtype, count = sum_dtype, self.rounding.key_parts
        if self.rounding.rounds_scores:
            score_dtype = v_BKSD.dtype
        with torch.autocast(q.device.type, enabled=False):
            scores = masked_scores(q.to(score_dtype), k.to(score_dtype), visible).to(sum_dtype)
            lse = scores.logsumexp(dim=-1, keepdim=True)
            weights = (scores - lse.detach()).exp().to(v_BKSD.dtype)
            values = v_BKSD.repeat_interleave(q.shape[1] // v_BKSD.shape[1], dim=1)
            parts = zip(weights.chunk(count, -1), values.chunk(count, 2), strict=True)
            sums = torch.stack([(part @ value).to(sum_dtype) for part, value in parts]).sum(dim=0)
            # A factor of 1, whose gradient subtracts dO . O as in flash attention.
            out = sums.to(v_BKSD.dtype) * (lse.detach() - lse).exp()
        return out.to(v_BKSD.dtype).transpose(1, 2), None


@contextmanager
def plain_attention_installed() -> Iterator[PlainAttention]:
    """Register plain attention in transformers as `PLAIN_NAME` within the context."""
    attention = PlainAttention()
    with register_attention(PLAIN_NAME, attention):
        yield attention
