"""DeepSpeed's Ulysses for Hugging Face models (ALST, arXiv:2506.13996): four all-to-alls a pass."""

from __future__ import annotations

from bench.config import Cell
from bench.strategies.facts import exchanged_kv_heads
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Communication, Schedule, Stage
from bench.strategies.ulysses.facts import UlyssesFacts, attend_to_heads, exchange_heads

POSITION_ID_BYTES = 8


class DeepSpeedUlyssesFacts(UlyssesFacts):
    name = "deepspeed_ulysses"
    style = PlotStyle("#56B4E9", "v")
    kept_copies = (1, 0)
    package = "deepspeed"

    def packing_refusals(self, cell: Cell) -> list[str]:
        """transformers, whose attention it wraps, takes position ids of one sequence only for boundaries."""
        refused = super().packing_refusals(cell)
        if refused or not cell.data.packs or cell.batch == 1:
            return refused
        way_out = f"take batch=1 and grad_accum={cell.batch * cell.grad_accum}, or strategy=ulysses"
        reason = "transformers finds boundaries in the position ids of one sequence only"
        return [f"data.packing=documents with batch={cell.batch} is not for {self.name}: {reason}; {way_out}"]

    def schedule(self, cell: Cell) -> Schedule:
        """The heads as in `ulysses`, each tensor by itself; every forward gathers the int64 position ids."""
        heads, kv_heads = cell.model.num_heads, exchanged_kv_heads(cell)
        attention = attend_to_heads(cell, heads, kv_heads)
        q, kv = exchange_heads(cell, heads), exchange_heads(cell, kv_heads)
        position_bytes = cell.batch * cell.shard_len * POSITION_ID_BYTES * (cell.sp_degree - 1)
        positions = Stage(communications=(Communication("all_gather", position_bytes, cell.sp_degree),))
        return Schedule(forward=(q, kv, kv, positions, attention, q), backward=(q, attention, q, kv, kv))
