"""ringmaster's Ulysses: all-to-alls of queries, of keys with values, of the output; on gloo all-gathers."""

from __future__ import annotations

from dataclasses import replace

from bench.config import Cell
from bench.strategies.facts import activation_bytes
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Communication, Schedule, Stage
from bench.strategies.ulysses.facts import UlyssesFacts, attend_to_heads, exchange_heads


class RingmasterUlyssesFacts(UlyssesFacts):
    name = "ringmaster_ulysses"
    style = PlotStyle("#44AA99", "H")
    takes_fewer_kv_heads = False
    package = "axolotl-ringmaster"
    tried = "0.2.7"

    def packing_refusals(self, cell: Cell) -> list[str]:
        """On one rank the package hands over no boundaries; its output was off by 0.98 of its maximum."""
        refused = super().packing_refusals(cell)
        if refused or not cell.data.packs or cell.sp_degree > 1:
            return refused
        return ["data.packing=documents is not for ringmaster_ulysses on one rank; take strategy=local"]

    def schedule(self, cell: Cell) -> Schedule:
        """The bytes of `ulysses` on NCCL; Q, K and V travel together where they have equally many heads."""
        heads, kv_heads = cell.model.num_heads, cell.model.num_kv_heads
        attention = attend_to_heads(cell, heads, kv_heads)
        together = [3 * heads] if heads == kv_heads else [heads, 2 * kv_heads]
        qkv, out = [trade_heads(cell, each) for each in together], trade_heads(cell, heads)
        return Schedule(forward=(*qkv, attention, out), backward=(out, attention, *reversed(qkv)))


def trade_heads(cell: Cell, heads: int) -> Stage:
    """One all-to-all; on gloo the package gathers all parts of all ranks instead, and keeps its own."""
    traded = exchange_heads(cell, heads)
    if cell.cluster.backend != "gloo":
        return traded
    degree, stride = cell.ulysses_degree, cell.ulysses_stride
    sent_bytes = activation_bytes(cell, heads) * (degree - 1)
    return replace(traded, communications=(Communication("all_gather", sent_bytes, degree, stride),))
