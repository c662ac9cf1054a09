"""yunchang's ring functions, as they are, on flash-attn or on the bridge to our kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from bench.attention.flash_attn_bridge import package_on
from bench.strategies.ring_flash_attn.attention import RingFlashAttention
from bench.strategies.shipped import parts_of_package

RINGS: Mapping[str, str] = {"zigzag": "zigzag", "contiguous": "basic", "striped": "strip"}
"""The package's own words for layouts."""


class YunchangRingAttention(RingFlashAttention):
    """Its functions descend from those of ring-flash-attn, and are called as they are."""

    def function_of_package(self) -> Callable[..., Any]:
        with parts_of_package(self.facts):
            rings: Mapping[str, Callable[..., Any]] = package_on(
                "yunchang", self.kernel
            ).hybrid.utils.RING_IMPL_DICT
            return rings[RINGS[self.cell.layout]]


STRATEGY = YunchangRingAttention
