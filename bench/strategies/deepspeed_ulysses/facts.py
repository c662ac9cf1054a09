"""DeepSpeed's Ulysses for Hugging Face models (ALST, arXiv:2506.13996): four all-to-alls a pass."""

from __future__ import annotations

from bench.config import RunConfig
from bench.strategies.facts import (
    Facts,
    backwards_per_step,
    exchanged_kv_heads,
    forwards_per_step,
    head_exchange_bytes,
    head_exchange_refusals,
)

POSITION_ID_BYTES = 8


class DeepSpeedUlysses(Facts):
    name = "deepspeed_ulysses"
    package = "deepspeed"

    def head_refusals(self, cell: RunConfig) -> list[str]:
        return head_exchange_refusals(cell)

    def exchange_bytes(self, cell: RunConfig) -> int:
        """The heads as in `ulysses`; every forward also all-gathers the int64 position ids, once a layer."""
        heads = 2 * cell.model.num_heads + 2 * exchanged_kv_heads(cell)
        passes = forwards_per_step(cell) + backwards_per_step(cell)
        positions = cell.batch * cell.shard_len * POSITION_ID_BYTES * (cell.sp_degree - 1)
        return head_exchange_bytes(cell, heads) * passes + positions * forwards_per_step(cell)
