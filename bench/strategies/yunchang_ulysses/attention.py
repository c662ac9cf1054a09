"""yunchang's `UlyssesAttention`, as it is, on flash-attn or on the bridge to our kernels."""

from __future__ import annotations

from torch import Tensor

from bench.attention.flash_attn_bridge import package_on
from bench.config import RunConfig
from bench.ranks.groups import RankGroups
from bench.strategies.facts import Facts
from bench.strategies.shipped import parts_of_package
from bench.strategies.strategy import Strategy


class YunchangUlyssesAttention(Strategy):
    def __init__(self, cell: RunConfig, groups: RankGroups, facts: Facts) -> None:
        super().__init__(cell, groups, facts)
        with parts_of_package(facts):
            self.package_attention = package_on("yunchang", self.kernel).UlyssesAttention(groups.sequence)

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        qkv = (x.transpose(1, 2) for x in (q_BNSD, k_BKSD, v_BKSD))
        out_BSND: Tensor = self.package_attention(*qkv, causal=causal)
        return out_BSND.transpose(1, 2)


STRATEGY = YunchangUlyssesAttention
