"""Facts of the built-in Ulysses, with one all-to-all for Q, K and V and one for the output."""

from __future__ import annotations

from bench.config import Cell, ModelConfig
from bench.strategies.facts import (
    ScheduledFacts,
    activation_bytes,
    all_to_all_head_refusals,
    sent_kv_heads,
)
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Communication, Schedule, Stage, whole_block


class UlyssesFacts(ScheduledFacts):
    name = "ulysses"
    style = PlotStyle("#0072B2", "s")
    supports_documents = True
    saved_copies = (1, 0)

    def ulysses_degree(self, sp_degree: int, model: ModelConfig) -> int:  # noqa: ARG002
        return sp_degree

    def head_refusals(self, cell: Cell) -> list[str]:
        return all_to_all_head_refusals(cell, repeats=self.repeats_kv_heads)

    def schedule(self, cell: Cell) -> Schedule:
        """Return all-to-alls that send (P-1)/P of Q, K, V and output, or in backward of their gradients.

        Source: arXiv:2309.14509, section 3.2.
        """
        heads, kv_heads = cell.model.num_heads, sent_kv_heads(cell)
        attention = attention_stage(cell, heads, kv_heads)
        qkv, out = all_to_all_stage(cell, heads + 2 * kv_heads), all_to_all_stage(cell, heads)
        return Schedule(forward=(qkv, attention, out), backward=(out, attention, qkv))


class PackagedUlyssesFacts(UlyssesFacts):
    """Base of packages that send each of Q, K, V and the output by an all-to-all and repeat no KV heads."""

    repeats_kv_heads = False
    supports_documents = False

    def schedule(self, cell: Cell) -> Schedule:
        """Return four all-to-alls that together send the bytes of `ulysses`."""
        heads, kv_heads = cell.model.num_heads, cell.model.num_kv_heads
        attention = attention_stage(cell, heads, kv_heads)
        q, kv = all_to_all_stage(cell, heads), all_to_all_stage(cell, kv_heads)
        return Schedule(forward=(q, kv, kv, attention, q), backward=(q, attention, kv, kv, q))


def attention_stage(cell: Cell, heads: int, kv_heads: int) -> Stage:
    """Return the stage in which a rank computes its part of `heads` and `kv_heads` over whole sequences."""
    return Stage((whole_block(cell, heads // cell.ulysses_degree, kv_heads // cell.ulysses_degree),))


def all_to_all_stage(cell: Cell, heads: int) -> Stage:
    """Return the stage of one all-to-all of `heads` heads of a shard, with a copy before and after it."""
    shard_bytes, ranks = activation_bytes(cell, heads), cell.ulysses_degree
    sent = Communication("all_to_all", shard_bytes * (ranks - 1) // ranks, ranks, cell.ulysses_stride)
    return Stage(communications=(sent,), packed_bytes=2 * shard_bytes)
