"""ring-flash-attn's `llama3_flash_attn_varlen_func`, as it is: one call per sequence of the batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bench.attention.flash_attn_bridge import flash_attn_from
from bench.config import RunConfig
from bench.ranks.groups import RankGroups
from bench.strategies.facts import Facts
from bench.strategies.strategy import Strategy

KV_HEADS_AT_A_TIME = 1
"""The package's `heads_k_stride` as its own examples have it: least memory, most overlap."""


class Llama3Attention(Strategy):
    def __init__(self, cell: RunConfig, groups: RankGroups, facts: Facts) -> None:
        super().__init__(cell, groups, facts)
        with flash_attn_from(self.kernel):
            import ring_flash_attn
        self.package = ring_flash_attn

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        outs_SND = self._by_sequence(q_BNSD, k_BKSD, v_BKSD, causal=causal)
        return torch.stack([out_SND.transpose(0, 1) for out_SND in outs_SND])

    def log_sum_exp(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        parts = self._by_sequence(q_BNSD, k_BKSD, v_BKSD, causal=causal, return_attn_probs=True)
        return torch.stack([lse_NS for _, lse_NS, _ in parts])

    def _by_sequence(self, *qkv: Tensor, causal: bool, **keywords: Any) -> list[Any]:
        """The package's results, one a sequence of the batch: its varlen functions take no batch."""
        seq_len, group = qkv[0].shape[2] * self.cell.sp_degree, self.groups.sequence
        boundaries = torch.tensor([0, seq_len], dtype=torch.int32, device=qkv[0].device)
        *packing, key_slice = self.package.llama3_flash_attn_prepare_cu_seqlens(
            boundaries, causal, rank=self.groups.sequence_rank, world_size=self.cell.sp_degree
        )
        return [
            self.package.llama3_flash_attn_varlen_func(
                *(x.transpose(0, 1).contiguous() for x in one),
                *packing,
                KV_HEADS_AT_A_TIME,
                key_slice,
                causal=causal,
                group=group,
                **keywords,
            )
            for one in zip(*qkv, strict=True)
        ]


STRATEGY = Llama3Attention
