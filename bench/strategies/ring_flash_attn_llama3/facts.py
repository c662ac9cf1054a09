"""ring-flash-attn's other algorithm, that of Llama 3: all keys of a few heads are gathered at a time."""

from __future__ import annotations

from bench.config import RunConfig
from bench.strategies.facts import Facts, activation_bytes, backwards_per_step, forwards_per_step


class RingFlashAttnLlama3(Facts):
    name = "ring_flash_attn_llama3"
    packs = True
    package = "ring-flash-attn"
    dtypes = ("bf16", "fp16")

    def exchange_bytes(self, cell: RunConfig) -> int:
        """K and V are gathered in forward and in backward, their gradients reduced and scattered.

        An all-gather hands a shard to P-1 ranks, a reduce-scatter hands P-1 shards over once
        (arXiv:2407.21783, section 3.3.2); gradients travel in the cell's dtype.
        """
        kv = activation_bytes(cell, 2 * cell.model.num_kv_heads) * (cell.sp_degree - 1)
        return kv * forwards_per_step(cell) + 2 * kv * backwards_per_step(cell)
