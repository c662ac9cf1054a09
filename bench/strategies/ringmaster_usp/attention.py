"""ringmaster's USP, unchanged, on flash-attn or on a stand-in that calls the cell's kernel."""

from __future__ import annotations

from bench.strategies.ringmaster_ring.attention import RingmasterRingAttention


class RingmasterUSPAttention(RingmasterRingAttention):
    backend = "USP"


STRATEGY = RingmasterUSPAttention
