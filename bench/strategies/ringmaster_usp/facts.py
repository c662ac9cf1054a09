"""Facts of ringmaster's USP, which runs the package's ring between the package's all-to-alls."""

from __future__ import annotations

from bench.attention.kernel_facts import FLASH_ATTN
from bench.config import Cell
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ringmaster_ring.facts import (
    ALLGATHER,
    P2P,
    ROTATION,
    autocast_refusals,
    kernel_refusals,
    ring_packing_refusals,
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
    flash_attn_kernels = (FLASH_ATTN, "math")  # with `math`, some rotations compute scores themselves
    tested_version = "0.2.7"
    options = {ROTATION: (ALLGATHER, P2P), **USPFacts.options}  # noqa: RUF012  constant, as in torch_cp

    def refusals(self, cell: Cell) -> list[str]:
        return [*super().refusals(cell), *kernel_refusals(cell)]

    def autocast_refusals(self, cell: Cell) -> list[str]:
        return autocast_refusals(cell)

    def packing_refusals(self, cell: Cell) -> list[str]:
        return [*super().packing_refusals(cell), *ring_packing_refusals(cell)]

    def saved_bytes_per_token(self, cell: Cell) -> int:
        return super().saved_bytes_per_token(cell) + ring_saved_bytes_per_token(cell)

    def schedule(self, cell: Cell) -> Schedule:
        """Return one all-to-all of Q, one of K and V together, the ring, and one all-to-all of the output."""
        heads, kv_heads, degree = cell.model.num_heads, cell.model.num_kv_heads, cell.ulysses_degree
        ring = ring_schedule(cell, heads // degree, kv_heads // degree)
        q, kv = ringmaster_all_to_all(cell, heads), ringmaster_all_to_all(cell, 2 * kv_heads)
        return Schedule(forward=(q, kv, *ring.forward, q), backward=(q, *ring.backward, kv, q))
