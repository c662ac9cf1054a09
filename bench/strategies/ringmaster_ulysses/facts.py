"""Facts of ringmaster's Ulysses, with all-to-alls of Q, of K with V and of the output."""

from __future__ import annotations

from dataclasses import replace

from bench.config import Cell
from bench.strategies.facts import activation_bytes
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Communication, Schedule, Stage
from bench.strategies.ulysses.facts import UlyssesFacts, all_to_all_stage, attention_stage


class RingmasterUlyssesFacts(UlyssesFacts):
    name = "ringmaster_ulysses"
    style = PlotStyle("#44AA99", "H")
    repeats_kv_heads = False
    package = "axolotl-ringmaster"
    tested_version = "0.2.7"

    def packing_refusals(self, cell: Cell) -> list[str]:
        """Return the reasons for which `data.packing=documents` is not legal.

        On one rank the package does not pass the documents' boundaries to the kernel. Its largest error was
        then 0.98 of the largest number in the right output.
        """
        refusals = super().packing_refusals(cell)
        if refusals or not cell.data.packs or cell.sp_degree > 1:
            return refusals
        return ["data.packing=documents is not for ringmaster_ulysses on one rank; take strategy=local"]

    def schedule(self, cell: Cell) -> Schedule:
        """Return the schedule. On NCCL its all-to-alls send as many bytes as those of `ulysses`.

        With equal numbers of query and KV heads, Q, K and V are sent in one. Otherwise Q is sent first, then
        K and V together.
        """
        heads, kv_heads = cell.model.num_heads, cell.model.num_kv_heads
        attention = attention_stage(cell, heads, kv_heads)
        sent_heads = [3 * heads] if heads == kv_heads else [heads, 2 * kv_heads]
        qkv, out = (
            [ringmaster_all_to_all(cell, count) for count in sent_heads],
            ringmaster_all_to_all(cell, heads),
        )
        return Schedule(forward=(*qkv, attention, out), backward=(out, attention, *reversed(qkv)))


def ringmaster_all_to_all(cell: Cell, heads: int) -> Stage:
    """Return the stage of one all-to-all of `heads` heads of a shard.

    On gloo the package all-gathers the whole shards instead, and every rank takes its heads of them.
    """
    stage = all_to_all_stage(cell, heads)
    if cell.cluster.backend != "gloo":
        return stage
    degree, stride = cell.ulysses_degree, cell.ulysses_stride
    sent_bytes = activation_bytes(cell, heads) * (degree - 1)
    return replace(stage, communications=(Communication("all_gather", sent_bytes, degree, stride),))
