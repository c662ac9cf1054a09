"""Our Ulysses: one all-to-all for Q, K and V before attention, one for the output after it."""

from __future__ import annotations

from bench.config import Cell, ModelConfig
from bench.strategies.facts import (
    ScheduledFacts,
    activation_bytes,
    all_to_all_head_refusals,
    exchanged_kv_heads,
)
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Communication, Schedule, Stage, whole_block


class UlyssesFacts(ScheduledFacts):
    name = "ulysses"
    style = PlotStyle("#0072B2", "s")
    packs = True
    kept_copies = (1, 0)

    def ulysses_degree(self, sp_degree: int, model: ModelConfig) -> int:  # noqa: ARG002
        return sp_degree

    def head_refusals(self, cell: Cell) -> list[str]:
        return all_to_all_head_refusals(cell, repeats=self.takes_fewer_kv_heads)

    def schedule(self, cell: Cell) -> Schedule:
        """(P-1)/P of Q, K, V and the output per pass, forward and backward alike (arXiv:2309.14509, 3.2)."""
        heads, kv_heads = cell.model.num_heads, exchanged_kv_heads(cell)
        attention = attend_to_heads(cell, heads, kv_heads)
        qkv, out = exchange_heads(cell, heads + 2 * kv_heads), exchange_heads(cell, heads)
        return Schedule(forward=(qkv, attention, out), backward=(out, attention, qkv))


class PackagedUlyssesFacts(UlyssesFacts):
    """A package's that exchanges Q, K, V and the output each by itself, and repeats no KV head."""

    takes_fewer_kv_heads = False
    packs = False

    def schedule(self, cell: Cell) -> Schedule:
        """The bytes of `ulysses`, in four all-to-alls."""
        heads, kv_heads = cell.model.num_heads, cell.model.num_kv_heads
        attention = attend_to_heads(cell, heads, kv_heads)
        q, kv = exchange_heads(cell, heads), exchange_heads(cell, kv_heads)
        return Schedule(forward=(q, kv, kv, attention, q), backward=(q, attention, kv, kv, q))


def attend_to_heads(cell: Cell, heads: int, kv_heads: int) -> Stage:
    """Attention of a rank's share of these heads over whole sequences."""
    return Stage((whole_block(cell, heads // cell.ulysses_degree, kv_heads // cell.ulysses_degree),))


def exchange_heads(cell: Cell, heads: int) -> Stage:
    """One all-to-all for `heads` heads of a shard, less a rank's own part, between copies that order it."""
    shard_bytes, ranks = activation_bytes(cell, heads), cell.ulysses_degree
    sent = Communication("all_to_all", shard_bytes * (ranks - 1) // ranks, ranks, cell.ulysses_stride)
    return Stage(communications=(sent,), packed_bytes=2 * shard_bytes)
