"""The ring-flash-attn package's own functions, as they are, on flash-attn or on the bridge to our kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from bench.attention.flash_attn_bridge import flash_attn_from
from bench.attention.strategy import Strategy
from bench.config import RunConfig
from bench.process_groups import RankGroups
from bench.strategies.facts import Facts

FUNCTIONS: Mapping[str, str] = {
    "zigzag": "zigzag_ring_flash_attn_func",
    "contiguous": "ring_flash_attn_func",
    "striped": "stripe_flash_attn_func",
}


class RingFlashAttention(Strategy):
    def __init__(self, cell: RunConfig, groups: RankGroups, facts: Facts) -> None:
        super().__init__(cell, groups, facts)
        with flash_attn_from(self.kernel):
            import ring_flash_attn
        self.function: Callable[..., Tensor] = getattr(ring_flash_attn, FUNCTIONS[cell.layout])

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        q_BSND, k_BSKD, v_BSKD = (x.transpose(1, 2).contiguous() for x in (q_BNSD, k_BKSD, v_BKSD))
        out_BSND = self.function(q_BSND, k_BSKD, v_BSKD, causal=causal, group=self.groups.sequence)
        return out_BSND.transpose(1, 2)


STRATEGY = RingFlashAttention
