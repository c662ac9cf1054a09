"""Facts of USP (arXiv:2405.07719), where ulysses_degree x ring_degree ranks share a sequence."""

from __future__ import annotations

import math

from bench.attention.layouts import LAYOUTS, cut_pieces
from bench.config import Cell, ModelConfig
from bench.strategies.facts import all_to_all_head_refusals
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ring.facts import RingFacts
from bench.strategies.schedule import Schedule
from bench.strategies.ulysses.facts import UlyssesFacts


class USPFacts(RingFacts):
    name = "usp"
    style = PlotStyle("#009E73", "D", "-.")
    is_hybrid = True
    saved_copies = (1, 2)
    options = {"inner": ("ulysses", "ring")}  # noqa: RUF012  constant, as in torch_cp

    def ulysses_degree(self, sp_degree: int, model: ModelConfig) -> int:
        """Return the largest divisor of `sp_degree` with which no KV head has to be repeated."""
        return math.gcd(sp_degree, model.num_kv_heads)

    def degree_refusals(self, cell: Cell) -> list[str]:
        if cell.sp_degree % cell.ulysses_degree == 0:
            return []
        return [
            f"ulysses_degree={cell.ulysses_degree} must divide sp_degree={cell.sp_degree}; leave it at auto"
        ]

    def length_multiple(self, cell: Cell) -> int:
        return LAYOUTS[cell.layout].length_multiple(cell.ring_degree) * cell.ulysses_degree

    def slices(self, cell: Cell, seq_len: int, group_rank: int) -> tuple[slice, ...]:
        """Return a rank's slices, which are its part of the ring shard that `ulysses_degree` ranks share."""
        ring_shard = LAYOUTS[cell.layout].slices(seq_len, cell.ring_degree, cell.ring_rank(group_rank))
        shard_len, ulysses_rank = seq_len // cell.sp_degree, cell.ulysses_rank(group_rank)
        return cut_pieces(ring_shard, seq_len, ulysses_rank * shard_len, (ulysses_rank + 1) * shard_len)

    def head_refusals(self, cell: Cell) -> list[str]:
        return all_to_all_head_refusals(cell, repeats=self.repeats_kv_heads)

    def schedule(self, cell: Cell) -> Schedule:
        """Return the all-to-alls of `ulysses` around a ring over longer shards of fewer heads."""
        ring, ulysses = super().schedule(cell), UlyssesFacts().schedule(cell)
        return Schedule(
            forward=(ulysses.forward[0], *ring.forward, ulysses.forward[-1]),
            backward=(ulysses.backward[0], *ring.backward, ulysses.backward[-1]),
        )
