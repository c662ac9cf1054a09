"""DeepSpeed's FPDT, unchanged, on flash-attn or on a stand-in that calls the cell's kernel.

Shapes: B batch, S tokens of a rank, N query heads, K KV heads, D head size, E = (N + 2K) D numbers of a
token's Q, K and V.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.attention.flash_attn_bridge import package_on
from bench.config import Cell
from bench.ranks.deepspeed import join_deepspeed
from bench.ranks.groups import RankGroups
from bench.strategies.deepspeed_fpdt.facts import offloads
from bench.strategies.facts import StrategyFacts
from bench.strategies.package_errors import refuse_package_errors
from bench.strategies.strategy import Strategy

SCATTER_DIM, GATHER_DIM = 2, 0
"""Default dimensions of `FPDT_Attention`."""


class DeepSpeedFPDTAttention(Strategy):
    def __init__(self, cell: Cell, groups: RankGroups, facts: StrategyFacts) -> None:
        super().__init__(cell, groups, facts)
        join_deepspeed(cell)
        with refuse_package_errors(facts):
            layer = package_on("deepspeed.sequence.fpdt_layer", self.kernel)
            name = "_FPDTGPUOffloadingAttentionImpl_" if offloads(cell) else "_FPDTGPUAttentionImpl_"
            self.operation = getattr(layer, name)

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:  # noqa: ARG002
        q_size, kv_size = (x.shape[1] * x.shape[3] for x in (q_BNSD, k_BKSD))
        qkv_SBE, identity_EE, zero_E = _projection(q_BNSD, k_BKSD, v_BKSD)
        out_BSND: Tensor = self.operation.apply(
            qkv_SBE,
            None,  # mask
            None,  # inference parameters
            None,  # rotary embedding
            self.groups.sequence,
            SCATTER_DIM,
            GATHER_DIM,
            len(zero_E),
            q_size,
            q_BNSD.shape[3],
            kv_size,
            identity_EE,
            zero_E,
            0.0,  # dropout
            self.cell.number("chunks"),
            offloads(self.cell),
        )
        return out_BSND.transpose(1, 2)


def _projection(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return Q, K and V as the projection's input, [S, B, E], with an identity weight and a zero bias."""
    qkv_BSE = torch.cat([x.transpose(1, 2).flatten(2) for x in (q_BNSD, k_BKSD, v_BKSD)], dim=-1)
    identity_EE = torch.eye(qkv_BSE.shape[-1], dtype=qkv_BSE.dtype, device=qkv_BSE.device)
    return qkv_BSE.transpose(0, 1), identity_EE, identity_EE.new_zeros(len(identity_EE))


STRATEGY = DeepSpeedFPDTAttention
