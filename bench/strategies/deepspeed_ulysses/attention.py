"""DeepSpeed's `UlyssesSPAttentionHF`, unchanged, around the cell's kernel."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor

from bench.config import Cell
from bench.ranks.deepspeed import join_deepspeed
from bench.ranks.groups import RankGroups
from bench.strategies.facts import StrategyFacts
from bench.strategies.strategy import Strategy


class DeepSpeedUlyssesAttention(Strategy):
    def __init__(self, cell: Cell, groups: RankGroups, facts: StrategyFacts) -> None:
        super().__init__(cell, groups, facts)
        join_deepspeed(cell)
        self.package_attention = UlyssesSPAttentionHF(
            attn=self._core_attention,
            batch_size=cell.batch,
            attn_head_count=cell.model.num_heads,
            attn_head_size=cell.model.head_dim,
            kv_head_count=cell.model.num_kv_heads,
            num_hidden_layers=cell.model.num_layers,
            process_group=groups.sequence,
            seq_length_is_variable=True,
        )

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        batch, _, shard_len, _ = q_BNSD.shape
        start = self.groups.sequence_rank * shard_len
        positions_S = torch.arange(start, start + shard_len, device=q_BNSD.device)
        # The package gathers position ids. `_core_attention` ignores them, because it uses `documents`.
        positions_BS = positions_S.repeat(batch, 1)
        out_BSND = self.model_attention(
            torch.nn.Module(), q_BNSD, k_BKSD, v_BKSD, position_ids=positions_BS, causal=causal
        )
        return out_BSND.transpose(1, 2)

    def model_attention(
        self,
        module: torch.nn.Module,
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        **keywords: Any,
    ) -> Tensor:
        flat_BSE, _ = self.package_attention(module, q_BNSD, k_BKSD, v_BKSD, None, **keywords)
        out_BSND: Tensor = flat_BSE.unflatten(-1, (q_BNSD.shape[1], q_BNSD.shape[3]))
        return out_BSND

    def _core_attention(
        self,
        module: torch.nn.Module,  # noqa: ARG002
        q_BMTD: Tensor,
        k_BLTD: Tensor,
        v_BLTD: Tensor,
        attention_mask: Tensor | None,  # noqa: ARG002
        *,
        causal: bool = True,
        **keywords: Any,  # noqa: ARG002
    ) -> tuple[Tensor, None]:
        """Return attention over whole sequences, [B, T, M, D], and no weights.

        It replaces transformers' attention with flash-attn, which in every layer reads document boundaries
        from the gathered position ids on the GPU, and makes the host wait. Here boundaries are known once a
        batch.
        """
        return self.attend_whole(q_BMTD, k_BLTD, v_BLTD, causal=causal).transpose(1, 2), None


STRATEGY = DeepSpeedUlyssesAttention
