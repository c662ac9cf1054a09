"""ring-flash-attn's `llama3_flash_attn_varlen_func`, as it is: one call per sequence of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.attention.flash_attn_bridge import flash_attn_from
from bench.attention.strategy import Strategy
from bench.config import RunConfig
from bench.process_groups import RankGroups
from bench.strategies.facts import Facts

KV_HEADS_AT_A_TIME = 1
"""The package's `heads_k_stride` as its own examples have it: least memory, most overlap."""


class Llama3Attention(Strategy):
    def __init__(self, cell: RunConfig, groups: RankGroups, facts: Facts) -> None:
        super().__init__(cell, groups, facts)
        with flash_attn_from(self.kernel):
            import ring_flash_attn
        self.package = ring_flash_attn

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        seq_len, group = q_BNSD.shape[2] * self.cell.sp_degree, self.groups.sequence
        boundaries = torch.tensor([0, seq_len], dtype=torch.int32, device=q_BNSD.device)
        packing = self.package.llama3_flash_attn_prepare_cu_seqlens(
            boundaries, causal, rank=self.groups.sequence_rank, world_size=self.cell.sp_degree
        )
        outs_NSD = []
        for sequence in range(q_BNSD.shape[0]):
            q, k, v = (x[sequence].transpose(0, 1).contiguous() for x in (q_BNSD, k_BKSD, v_BKSD))
            out_SND = self.package.llama3_flash_attn_varlen_func(
                q, k, v, *packing[:4], KV_HEADS_AT_A_TIME, packing[4], causal=causal, group=group
            )
            outs_NSD.append(out_SND.transpose(0, 1))
        return torch.stack(outs_NSD)


STRATEGY = Llama3Attention
