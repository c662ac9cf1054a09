"""yunchang's rings, which descend from ring-flash-attn's and send what those do."""

from __future__ import annotations

from bench.strategies.ring_flash_attn.facts import RingFlashAttn


class YunchangRing(RingFlashAttn):
    name = "yunchang_ring"
    package = "yunchang"
    tried = "0.6.4"
