"""yunchang's `UlyssesAttention`, unchanged, on flash-attn or on a stand-in that calls the cell's kernel."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bench.attention.flash_attn_bridge import package_on
from bench.strategies.strategy import Strategy

ATTENTION_TYPES: Mapping[str, str] = {"flash_attn_3": "FA3"}
"""yunchang's names of the kernels that it calls itself, by our names.

Every other kernel takes the place of flash-attn, which yunchang calls `FA`. yunchang's rings have an `FA3`,
too. It is not used, because it always passes `causal=False`, and arguments that FlashAttention-3 no longer
accepts (`yunchang/kernels/attention.py`, `flash_attn3_func_forward`).
"""


class YunchangUlyssesAttention(Strategy):
    package_attention: Any

    def load_package(self) -> None:
        package = package_on("yunchang", self.kernel)
        kind = package.kernels.AttnType[ATTENTION_TYPES.get(self.kernel.name, "FA")]
        self.package_attention = package.UlyssesAttention(self.groups.sequence, attn_type=kind)

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        qkv = (x.transpose(1, 2) for x in (q_BNSD, k_BKSD, v_BKSD))
        out_BSND: Tensor = self.package_attention(*qkv, causal=causal)
        return out_BSND.transpose(1, 2)


STRATEGY = YunchangUlyssesAttention
