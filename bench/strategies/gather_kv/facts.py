"""Our gathered keys: an all-gather of K and V in forward, a reduce-scatter of their gradients in backward."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from bench.config import DTYPE_BYTES, RunConfig
from bench.strategies.facts import ScheduledFacts, activation_bytes
from bench.strategies.schedule import Block, Exchange, Schedule, Stage, ring_blocks, tensor_bytes, wide


class GatherKV(ScheduledFacts):
    name = "gather_kv"
    packs = True
    layouts = ("zigzag", "contiguous", "striped")

    def schedule(self, cell: RunConfig) -> Schedule:
        """Forward hands a shard of K and V to P-1 ranks, backward P-1 shards of their gradients to one each.

        As Llama 3 was trained (arXiv:2407.21783, section 3.3.2), with all heads at once; gradients travel in
        float32, float64 for float64. One's own keys need no gathering, so their block hides it.
        """
        heads, kv_heads, ranks = cell.model.num_heads, cell.model.num_kv_heads, cell.sp_degree
        own, *others = ring_blocks(cell, heads, kv_heads)
        blocks = (own, *in_one_call(others))
        kv_bytes = activation_bytes(cell, 2 * kv_heads)
        gathered = Exchange("all_gather", (ranks - 1) * kv_bytes, ranks)
        scattered = Exchange("reduce_scatter", (ranks - 1) * wide(cell, kv_bytes), ranks)
        merged = sum(tensor_bytes(cell, heads, block.queries) for block in blocks[1:])
        gradients = sum(
            tensor_bytes(cell, heads, block.queries) + tensor_bytes(cell, 2 * kv_heads, block.keys)
            for block in blocks
        )
        return Schedule(
            forward=(
                Stage((own,), (gathered,), is_hidden=True, packed_bytes=kv_bytes),
                Stage(blocks[1:], merged_bytes=wide(cell, merged)),
            ),
            backward=(Stage(blocks, merged_bytes=wide(cell, gradients)), Stage(exchanges=(scattered,))),
        )

    def kept_bytes_per_token(self, cell: RunConfig) -> int:
        """The keys and values of all other ranks: what is kept does not shrink as ranks are added."""
        model = cell.model
        return (cell.sp_degree - 1) * 2 * model.num_kv_heads * model.head_dim * DTYPE_BYTES[cell.dtype]


def in_one_call(blocks: Sequence[Block]) -> Iterator[Block]:
    """The same blocks, but equal ones that see all of their keys as one of all these keys."""
    for block, equals in groupby(blocks):
        count = len([*equals])
        if block.is_causal:
            yield from (block,) * count
        else:
            yield replace(block, keys=count * block.keys)
