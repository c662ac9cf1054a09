"""The ring-flash-attn package: KV blocks travel round the ring, their gradients behind them in float32."""

from __future__ import annotations

from bench.config import RunConfig
from bench.strategies.facts import (
    Facts,
    activation_bytes,
    backwards_per_step,
    forwards_per_step,
)

FP32_BYTES = 4


class RingFlashAttn(Facts):
    name = "ring_flash_attn"
    layouts = ("zigzag",)
    package = "ring-flash-attn"
    # In float32 the package's first `.to(float32)` aliases its block buffer and gradients come out wrong.
    dtypes = ("bf16", "fp16")

    def exchange_bytes(self, cell: RunConfig) -> int:
        """K and V make P-1 hops in either direction of the pass; dK and dV make P, in float32."""
        kv = activation_bytes(cell, 2 * cell.model.num_kv_heads)
        dkv = cell.batch * 2 * cell.model.num_kv_heads * cell.shard_len * cell.model.head_dim * FP32_BYTES
        hops = cell.sp_degree - 1
        forward = kv * hops
        backward = kv * hops + dkv * (cell.sp_degree if hops else 0)
        return forward * forwards_per_step(cell) + backward * backwards_per_step(cell)
