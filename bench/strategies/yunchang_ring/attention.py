"""yunchang's ring functions, as they are, on flash-attn or on the bridge to our kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from bench.attention.flash_attn_bridge import package_on
from bench.config import RunConfig
from bench.ranks.groups import RankGroups
from bench.strategies.facts import Facts
from bench.strategies.shipped import parts_of_package
from bench.strategies.strategy import Strategy

RINGS: Mapping[str, str] = {"zigzag": "zigzag", "contiguous": "basic", "striped": "strip"}
"""The package's own words for layouts."""


class YunchangRingAttention(Strategy):
    def __init__(self, cell: RunConfig, groups: RankGroups, facts: Facts) -> None:
        super().__init__(cell, groups, facts)
        with parts_of_package(facts):
            rings = package_on("yunchang", self.kernel).hybrid.utils.RING_IMPL_DICT
            self.function: Callable[..., Any] = rings[RINGS[cell.layout]]

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        out_BSND: Tensor = self._call(q_BNSD, k_BKSD, v_BKSD, causal=causal)
        return out_BSND.transpose(1, 2)

    def log_sum_exp(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        lse_BNS: Tensor = self._call(q_BNSD, k_BKSD, v_BKSD, causal=causal, return_attn_probs=True)[1]
        return lse_BNS

    def _call(self, *qkv: Tensor, **keywords: Any) -> Any:
        q_BSND, k_BSKD, v_BSKD = (x.transpose(1, 2).contiguous() for x in qkv)
        return self.function(q_BSND, k_BSKD, v_BSKD, group=self.groups.sequence, **keywords)


STRATEGY = YunchangRingAttention
