"""DeepSpeed's `UlyssesSPAttentionHF`, as it is, around our kernels."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor

from bench.attention.kernels import attend
from bench.attention.packed import attend_packed, restarted, sent
from bench.config import RunConfig
from bench.ranks.deepspeed import join_deepspeed
from bench.ranks.groups import RankGroups
from bench.strategies.facts import Facts
from bench.strategies.strategy import Strategy


class DeepSpeedUlyssesAttention(Strategy):
    def __init__(self, cell: RunConfig, groups: RankGroups, facts: Facts) -> None:
        super().__init__(cell, groups, facts)
        join_deepspeed(cell)
        self.exchange = UlyssesSPAttentionHF(
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
        positions_BS = self._positions(len(q_BNSD), q_BNSD.shape[2], q_BNSD.device)
        out_BSND = self.model_attention(
            torch.nn.Module(), q_BNSD, k_BKSD, v_BKSD, position_ids=positions_BS.contiguous(), causal=causal
        )
        return out_BSND.transpose(1, 2)

    def _positions(self, batch: int, shard_len: int, device: torch.device) -> Tensor:
        """Those that a model is given on this rank: they begin anew in every document."""
        start = self.groups.sequence_rank * shard_len
        if self.documents is not None:
            return sent(restarted(self.documents)[:, start : start + shard_len], device)
        return torch.arange(start, start + shard_len, device=device).expand(batch, -1)

    def model_attention(
        self,
        module: torch.nn.Module,
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        **keywords: Any,
    ) -> Tensor:
        flat_BSE, _ = self.exchange(module, q_BNSD, k_BKSD, v_BKSD, None, **keywords)
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
        """Stands for transformers' attention on flash-attn, which reads boundaries from gathered positions.

        It reads them from the device in every layer, and the host waits. Here they are known once a batch.
        """
        if self.packing is not None:
            out_BMTD = attend_packed(q_BMTD, k_BLTD, v_BLTD, kernel=self.kernel, packing=self.packing)
        else:
            out_BMTD = attend(q_BMTD, k_BLTD, v_BLTD, kernel=self.kernel, causal=causal)
        return out_BMTD.transpose(1, 2), None


STRATEGY = DeepSpeedUlyssesAttention
