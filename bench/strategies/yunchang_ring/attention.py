"""yunchang's ring functions, unchanged, on flash-attn or on a stand-in that calls the cell's kernel."""

from __future__ import annotations

from collections.abc import Mapping

from bench.attention.flash_attn_bridge import package_on
from bench.strategies.ring_flash_attn.attention import RingFlashAttention

RINGS: Mapping[str, str] = {"zigzag": "zigzag", "contiguous": "basic", "striped": "strip"}
"""Names of layouts in the package."""


class YunchangRingAttention(RingFlashAttention):
    """Ring of yunchang, whose functions descend from ring-flash-attn's and have their arguments."""

    def load_package(self) -> None:
        rings = package_on("yunchang", self.kernel).hybrid.utils.RING_IMPL_DICT
        self.function = rings[RINGS[self.cell.layout]]


STRATEGY = YunchangRingAttention
