"""ringmaster's USP, as it is, on flash-attn or on the bridge to our kernels."""

from __future__ import annotations

from bench.strategies.ringmaster_ring.attention import RingmasterRingAttention


class RingmasterUSPAttention(RingmasterRingAttention):
    backend = "USP"


STRATEGY = RingmasterUSPAttention
