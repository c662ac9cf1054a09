"""Facts of DeepSpeed's Ulysses for Hugging Face models (ALST, arXiv:2506.13996), with four all-to-alls."""

from __future__ import annotations

from bench.config import Cell
from bench.strategies.facts import sent_kv_heads
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Communication, Schedule, Stage
from bench.strategies.ulysses.facts import UlyssesFacts, all_to_all_stage, attention_stage

POSITION_ID_BYTES = 8
"""Bytes of one position id, an int64."""


class DeepSpeedUlyssesFacts(UlyssesFacts):
    name = "deepspeed_ulysses"
    style = PlotStyle("#56B4E9", "v")
    saved_copies = (1, 0)
    package = "deepspeed"

    def packing_refusals(self, cell: Cell) -> list[str]:
        """Return the reasons against packed documents; transformers finds boundaries only in a batch of 1."""
        refusals = super().packing_refusals(cell)
        if refusals or not cell.data.packs or cell.batch == 1:
            return refusals
        way_out = f"take batch=1 and grad_accum={cell.batch * cell.grad_accum}, or strategy=ulysses"
        reason = "transformers finds document boundaries only in a batch of one sequence"
        return [f"data.packing=documents with batch={cell.batch} is not for {self.name}: {reason}; {way_out}"]

    def schedule(self, cell: Cell) -> Schedule:
        """Return an all-to-all for each of Q, K, V and the output; forward also gathers position ids."""
        heads, kv_heads = cell.model.num_heads, sent_kv_heads(cell)
        attention = attention_stage(cell, heads, kv_heads)
        q, kv = all_to_all_stage(cell, heads), all_to_all_stage(cell, kv_heads)
        position_bytes = cell.batch * cell.shard_len * POSITION_ID_BYTES * (cell.sp_degree - 1)
        positions = Stage(communications=(Communication("all_gather", position_bytes, cell.sp_degree),))
        return Schedule(forward=(q, kv, kv, positions, attention, q), backward=(q, attention, q, kv, kv))
