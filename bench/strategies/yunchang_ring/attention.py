"""yunchang's ring functions, as they are, on flash-attn or on the bridge to our kernels."""

from __future__ import annotations

from collections.abc import Mapping

from bench.attention.flash_attn_bridge import package_on
from bench.strategies.ring_flash_attn.attention import RingFlashAttention

RINGS: Mapping[str, str] = {"zigzag": "zigzag", "contiguous": "basic", "striped": "strip"}
"""The package's own words for layouts."""


class YunchangRingAttention(RingFlashAttention):
    """Its functions descend from those of ring-flash-attn, and are called as they are."""

    def load_package(self) -> None:
        rings = package_on("yunchang", self.kernel).hybrid.utils.RING_IMPL_DICT
        self.function = rings[RINGS[self.cell.layout]]


STRATEGY = YunchangRingAttention
