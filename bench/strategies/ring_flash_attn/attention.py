"""Functions of ring-flash-attn, unchanged, on flash-attn or on a stand-in that calls the cell's kernel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from bench.attention.flash_attn_bridge import package_on
from bench.strategies.strategy import Strategy

FUNCTIONS: Mapping[str, str] = {
    "zigzag": "zigzag_ring_flash_attn_func",
    "contiguous": "ring_flash_attn_func",
    "striped": "stripe_flash_attn_func",
}
"""Function of the package for every layout."""


class RingFlashAttention(Strategy):
    def load_package(self) -> None:
        package = package_on("ring_flash_attn", self.kernel)
        self.function: Callable[..., Any] = getattr(package, FUNCTIONS[self.cell.layout])

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        out_BSND: Tensor = self._call(q_BNSD, k_BKSD, v_BKSD, causal=causal)
        return out_BSND.transpose(1, 2)

    def log_sum_exp(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        lse_BNS: Tensor = self._call(q_BNSD, k_BKSD, v_BKSD, causal=causal, return_attn_probs=True)[1]
        return lse_BNS

    def _call(self, *qkv: Tensor, **keywords: Any) -> Any:
        q_BSND, k_BSKD, v_BSKD = (x.transpose(1, 2) for x in qkv)
        return self.function(q_BSND, k_BSKD, v_BSKD, group=self.groups.sequence, **keywords)


STRATEGY = RingFlashAttention
