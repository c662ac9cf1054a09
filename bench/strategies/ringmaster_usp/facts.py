"""ringmaster's USP: its ring between its all-to-alls."""

from __future__ import annotations

from bench.config import Cell
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ringmaster_ring.facts import (
    ALLGATHER,
    P2P,
    ROTATION,
    autocast_refusals,
    boundary_refusals,
    kept_by_ring,
    kernel_refusals,
    ring_schedule,
)
from bench.strategies.ringmaster_ulysses.facts import trade_heads
from bench.strategies.schedule import Schedule
from bench.strategies.usp.facts import USPFacts


class RingmasterUSPFacts(USPFacts):
    name = "ringmaster_usp"
    style = PlotStyle("#44AA99", (4, 1, 0), "-.")
    takes_fewer_kv_heads = False
    kept_copies = (1, 0)
    layouts = ("contiguous",)
    package = "axolotl-ringmaster"
    tried = "0.2.7"
    options = {ROTATION: (ALLGATHER, P2P), **USPFacts.options}  # noqa: RUF012  a class's own constant, as in torch_cp

    def refusals(self, cell: Cell) -> list[str]:
        return [*super().refusals(cell), *kernel_refusals(cell)]

    def autocast_refusals(self, cell: Cell) -> list[str]:
        return autocast_refusals(cell)

    def packing_refusals(self, cell: Cell) -> list[str]:
        return [*super().packing_refusals(cell), *boundary_refusals(cell)]

    def kept_bytes_per_token(self, cell: Cell) -> int:
        return super().kept_bytes_per_token(cell) + kept_by_ring(cell)

    def schedule(self, cell: Cell) -> Schedule:
        """Q, then K with V, then the output are traded for heads, also where heads are equally many."""
        heads, kv_heads, degree = cell.model.num_heads, cell.model.num_kv_heads, cell.ulysses_degree
        ring = ring_schedule(cell, heads // degree, kv_heads // degree)
        q, kv = trade_heads(cell, heads), trade_heads(cell, 2 * kv_heads)
        return Schedule(forward=(q, kv, *ring.forward, q), backward=(q, *ring.backward, kv, q))
