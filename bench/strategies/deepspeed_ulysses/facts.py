"""DeepSpeed's Ulysses for Hugging Face models (ALST, arXiv:2506.13996): four all-to-alls a pass."""

from __future__ import annotations

from bench.config import RunConfig
from bench.strategies.facts import forwards_per_step
from bench.strategies.ulysses.facts import Ulysses

POSITION_ID_BYTES = 8


class DeepSpeedUlysses(Ulysses):
    name = "deepspeed_ulysses"
    packs = False
    why_it_packs_not = (
        "DeepSpeed hands gathered position ids to the attention it wraps, which is a kernel that reads none"
    )
    kept_copies = (1, 0)
    package = "deepspeed"

    def exchange_bytes(self, cell: RunConfig) -> int:
        """The heads as in `ulysses`; every forward also all-gathers the int64 position ids, once a layer."""
        positions = cell.batch * cell.shard_len * POSITION_ID_BYTES * (cell.sp_degree - 1)
        return super().exchange_bytes(cell) + positions * forwards_per_step(cell)
