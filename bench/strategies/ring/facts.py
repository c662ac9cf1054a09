"""Our ring: KV blocks travel round the ring while ranks compute, their gradients follow in wide precision."""

from __future__ import annotations

from typing import ClassVar

from bench.config import DTYPE_BYTES, RunConfig
from bench.strategies.facts import (
    Facts,
    activation_bytes,
    backwards_per_step,
    exchanged_kv_heads,
    forwards_per_step,
)

WIDE_BYTES = 4


class Ring(Facts):
    name = "ring"
    packs = True
    layouts: ClassVar[tuple[str, ...]] = ("zigzag", "contiguous", "striped")

    def exchange_bytes(self, cell: RunConfig) -> int:
        """K and V make P-1 hops in forward and again in backward; their gradients make P, the last one home.

        Gradients travel in float32, float64 for float64. The rotation is that of arXiv:2310.01889, section 3.
        """
        hops = cell.ring_degree - 1
        if hops == 0:
            return 0
        kv = activation_bytes(cell, 2 * exchanged_kv_heads(cell))
        dkv = kv // DTYPE_BYTES[cell.dtype] * max(WIDE_BYTES, DTYPE_BYTES[cell.dtype])
        forward, backward = kv * hops, kv * hops + dkv * (hops + 1)
        return forward * forwards_per_step(cell) + backward * backwards_per_step(cell)
