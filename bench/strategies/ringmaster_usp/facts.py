"""Facts of ringmaster's USP, which is its ring between its all-to-alls."""

from __future__ import annotations

from bench.config import Cell
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ringmaster_ring.facts import (
    ALLGATHER,
    P2P,
    ROTATION,
    autocast_refusals,
    boundary_refusals,
    kernel_refusals,
    ring_saved_bytes_per_token,
    ring_schedule,
)
from bench.strategies.ringmaster_ulysses.facts import ringmaster_all_to_all
from bench.strategies.schedule import Schedule
from bench.strategies.usp.facts import USPFacts


class RingmasterUSPFacts(USPFacts):
    name = "ringmaster_usp"
    style = PlotStyle("#44AA99", (4, 1, 0), "-.")
    repeats_kv_heads = False
    saved_copies = (1, 0)
    layouts = ("contiguous",)
    package = "axolotl-ringmaster"
    tested_version = "0.2.7"
    options = {ROTATION: (ALLGATHER, P2P), **USPFacts.options}  # noqa: RUF012  constant, as in torch_cp

    def refusals(self, cell: Cell) -> list[str]:
        return [*super().refusals(cell), *kernel_refusals(cell)]

    def autocast_refusals(self, cell: Cell) -> list[str]:
        return autocast_refusals(cell)

    def document_refusals(self, cell: Cell) -> list[str]:
        return [*super().document_refusals(cell), *boundary_refusals(cell)]

    def saved_bytes_per_token(self, cell: Cell) -> int:
        return super().saved_bytes_per_token(cell) + ring_saved_bytes_per_token(cell)

    def schedule(self, cell: Cell) -> Schedule:
        """Return all-to-alls of Q, of K with V and of the output around the ring, whatever the heads."""
        heads, kv_heads, degree = cell.model.num_heads, cell.model.num_kv_heads, cell.ulysses_degree
        ring = ring_schedule(cell, heads // degree, kv_heads // degree)
        q, kv = ringmaster_all_to_all(cell, heads), ringmaster_all_to_all(cell, 2 * kv_heads)
        return Schedule(forward=(q, kv, *ring.forward, q), backward=(q, *ring.backward, kv, q))
