"""Attention as the formula has it, under a name by which transformers finds it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bench.attention.documents import Documents
from bench.measure.parity.exact import masked_scores, visible
from bench.strategies.strategy import attention_replaced

PLAIN_NAME = "bench_plain_attention"


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
