"""Our gathered keys: an all-gather of K and V in forward, a reduce-scatter of their gradients in backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from bench.attention.layouts import Tile
from bench.config import DTYPE_BYTES, Cell
from bench.strategies.facts import CallMemory, ScheduledFacts, activation_bytes, lse_bytes, repeats_kv
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Block, Communication, Schedule, Stage, tensor_bytes, tile_of, wide

TilesOf = Callable[[int], Sequence[Tile]]
"""What the mask leaves of a rank's keys, by its number."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """The keys of one kernel call: of these ranks, one after another, what the mask leaves of each."""

    sources: slice
    tile: Tile

    @property
    def ranks(self) -> int:
        """How many ranks' keys these are."""
        return int(self.sources.stop - self.sources.start)


def calls_on_own(tiles_of: TilesOf, rank: int) -> list[KernelCall]:
    """Those on the rank's own keys, of which every query sees some."""
    return [*_calls(tiles_of, range(rank, rank + 1))]


def calls_on_others(tiles_of: TilesOf, rank: int, ranks: int) -> list[KernelCall]:
    """Those on all other ranks' keys.

    Neighbours of which the mask leaves the same, and no triangle, are taken at once: in contiguous and zigzag
    layout all earlier ranks are, and all later ones, whatever their number.
    """
    return [*_calls(tiles_of, range(rank)), *_calls(tiles_of, range(rank + 1, ranks))]


def _calls(tiles_of: TilesOf, sources: range) -> Iterator[KernelCall]:
    for tiles, group in groupby(sources, key=lambda source: tuple(tiles_of(source))):
        first, *others = group
        after = first + 1 + len(others)
        for tile in tiles:
            at_once = 1 if tile.causal else after - first
            for start in range(first, after, at_once):
                yield KernelCall(slice(start, start + at_once), tile)


class GatherKVFacts(ScheduledFacts):
    name = "gather_kv"
    style = PlotStyle("#882255", "*", ":")
    packs = True
    layouts = ("zigzag", "contiguous", "striped")

    def schedule(self, cell: Cell) -> Schedule:
        """Forward hands a shard of K and V to P-1 ranks, backward P-1 shards of their gradients to one each.

        As Llama 3 was trained (arXiv:2407.21783, section 3.3.2), with all heads at once; gradients travel in
        float32, float64 for float64. One's own keys need no gathering, so their block hides it. In every
        layout the last rank has as much to do as any other, or more.
        """
        heads, kv_heads, ranks = cell.model.num_heads, cell.model.num_kv_heads, cell.sp_degree
        own, *others = (block for _, block in blocks_of(cell, ranks - 1))
        kv_bytes = activation_bytes(cell, 2 * kv_heads)
        gathered = Communication("all_gather", (ranks - 1) * kv_bytes, ranks)
        scattered = Communication("reduce_scatter", (ranks - 1) * wide(cell, kv_bytes), ranks)
        merged = sum(tensor_bytes(cell, heads, block.queries) for block in others)
        gradients = sum(
            tensor_bytes(cell, heads, block.queries) + tensor_bytes(cell, 2 * kv_heads, block.keys)
            for block in (own, *others)
        )
        return Schedule(
            forward=(
                Stage((own,), (gathered,), is_hidden=True, packed_bytes=kv_bytes),
                Stage(tuple(others), merged_bytes=wide(cell, merged)),
            ),
            backward=(
                Stage((own, *others), merged_bytes=wide(cell, gradients)),
                Stage(communications=(scattered,)),
            ),
        )

    def kept_bytes_per_token(self, cell: Cell) -> int:
        """The keys and values of all other ranks: what is kept does not shrink as ranks are added."""
        model = cell.model
        return (cell.sp_degree - 1) * 2 * model.num_kv_heads * model.head_dim * DTYPE_BYTES[cell.dtype]

    def call_memory(self, cell: Cell) -> CallMemory:
        """All ranks' keys and values and, wide, the partial output; in backward the gradients of all, wide.

        Beside these the fullest of: a block, with copies of keys that are of several ranks and what the
        kernel returns; that as it is made wide; the results as they are made narrow, with gloo's own copy of
        all gradients, which it reduces in place of scattering them.
        """
        model = cell.model
        q, kv = activation_bytes(cell, model.num_heads), activation_bytes(cell, 2 * model.num_kv_heads)
        gathered, is_narrow = cell.sp_degree * kv, wide(cell, q) > q
        copied = wide(cell, gathered) if cell.cluster.backend == "gloo" else 0
        forward, backward = [is_narrow * q], [wide(cell, kv) + copied + is_narrow * (kv + q)]
        for is_own, is_copy, block in _fullest_blocks(cell):
            queries = tensor_bytes(cell, block.heads, block.queries)
            keys = tensor_bytes(cell, 2 * block.kv_heads, block.keys)
            repeated = tensor_bytes(cell, 2 * block.heads, block.keys) if repeats_kv(cell) else 0
            before = wide(cell, q) if is_own else 0  # there is no partial output yet
            forward.append(queries + max(is_copy * keys + repeated, is_narrow * wide(cell, queries)) - before)
            backward.append(queries + keys + is_copy * keys + 2 * repeated)
        kept = gathered + q + lse_bytes(cell)
        return CallMemory(
            forward=kept - q + wide(cell, q) + max(forward),
            kept=kept,
            backward=wide(cell, q + gathered) + max(backward),
        )


def _fullest_blocks(cell: Cell) -> Iterator[tuple[bool, bool, Block]]:
    """Those of the first and the last rank, with whether their keys are the rank's own."""
    for rank in {0, cell.sp_degree - 1}:
        for number, (is_copy, block) in enumerate(blocks_of(cell, rank)):
            yield number == 0, is_copy, block


def blocks_of(cell: Cell, rank: int) -> Iterator[tuple[bool, Block]]:
    """The rank's kernel calls, its own keys first, and whether they take a copy: of keys of several ranks."""

    def tiles_of(source: int) -> tuple[Tile, ...]:
        tile = tile_of(cell, cell.shard_len, rank, source)
        return () if tile is None else (tile,)

    model = cell.model
    for call in (*calls_on_own(tiles_of, rank), *calls_on_others(tiles_of, rank, cell.sp_degree)):
        queries, keys = (len(range(cell.shard_len)[part]) for part in (call.tile.queries, call.tile.keys))
        block = Block(
            cell.batch, model.num_heads, model.num_kv_heads, queries, call.ranks * keys, call.tile.causal
        )
        yield call.ranks > 1, block
