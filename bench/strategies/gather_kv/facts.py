"""Facts of `gather_kv`, which all-gathers K and V and reduce-scatters their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from bench.attention.layouts import Tile
from bench.config import DTYPE_BYTES, Cell
from bench.strategies.facts import CallMemory, ScheduledFacts, activation_bytes, kernel_repeats_kv, lse_bytes
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import (
    Block,
    Communication,
    Schedule,
    Stage,
    mask_tile,
    tensor_bytes,
    wide_bytes,
)

TilesOf = Callable[[int], Sequence[Tile]]
"""Function from the number of a rank to the tiles that the mask leaves of the rank's keys."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Kernel call on the keys of neighbouring ranks of which the mask leaves the same tile."""

    sources: slice
    """Numbers of the ranks that hold the keys."""
    tile: Tile
    """Queries of this rank, and keys of each of the ranks."""

    @property
    def ranks(self) -> int:
        """Number of ranks whose keys the call takes."""
        return int(self.sources.stop - self.sources.start)


def calls_on_own(tiles_of: TilesOf, rank: int) -> list[KernelCall]:
    """Return the kernel calls on a rank's local keys, of which every query sees at least one."""
    return [*_calls(tiles_of, range(rank, rank + 1))]


def calls_on_others(tiles_of: TilesOf, rank: int, ranks: int) -> list[KernelCall]:
    """Return the kernel calls on the keys of all other ranks.

    One call takes the keys of all neighbouring ranks with the same tile, unless the tile is a triangle. In
    the contiguous and zigzag layouts these are all earlier ranks, or all later ones, however many there are.
    """
    return [*_calls(tiles_of, range(rank)), *_calls(tiles_of, range(rank + 1, ranks))]


def _calls(tiles_of: TilesOf, sources: range) -> Iterator[KernelCall]:
    for tiles, group in groupby(sources, key=lambda source: tuple(tiles_of(source))):
        neighbours = [*group]
        start, stop = neighbours[0], neighbours[-1] + 1
        for tile in tiles:
            ranks_per_call = 1 if tile.causal else stop - start
            for first in range(start, stop, ranks_per_call):
                yield KernelCall(slice(first, first + ranks_per_call), tile)


class GatherKVFacts(ScheduledFacts):
    name = "gather_kv"
    style = PlotStyle("#882255", "*", ":")
    supports_documents = True
    layouts = ("zigzag", "contiguous", "striped")

    def schedule(self, cell: Cell) -> Schedule:
        """Return an all-gather of K and V in forward, and a reduce-scatter of their gradients in backward.

        A rank sends its K and V to P-1 ranks, and P-1 shards of gradients to one rank each, as in the
        training of Llama 3 (arXiv:2407.21783, section 3.3.2) but with all heads at once. Gradients are sent
        in float32, or in float64 for float64. The block of local keys hides the all-gather. The stages are
        those of the last rank, which in every layout has at least as much work as any other.
        """
        heads, kv_heads, ranks = cell.model.num_heads, cell.model.num_kv_heads, cell.sp_degree
        own, *others = (block for _, block in blocks_of(cell, ranks - 1))
        kv_bytes = activation_bytes(cell, 2 * kv_heads)
        gathered = Communication("all_gather", (ranks - 1) * kv_bytes, ranks)
        scattered = Communication("reduce_scatter", (ranks - 1) * wide_bytes(cell, kv_bytes), ranks)
        merged = sum(tensor_bytes(cell, heads, block.queries) for block in others)
        gradients = sum(
            tensor_bytes(cell, heads, block.queries) + tensor_bytes(cell, 2 * kv_heads, block.keys)
            for block in (own, *others)
        )
        return Schedule(
            forward=(
                Stage((own,), (gathered,), is_hidden=True, packed_bytes=kv_bytes),
                Stage(tuple(others), merged_bytes=wide_bytes(cell, merged)),
            ),
            backward=(
                Stage((own, *others), merged_bytes=wide_bytes(cell, gradients)),
                Stage(communications=(scattered,)),
            ),
        )

    def saved_bytes_per_token(self, cell: Cell) -> int:
        """Return the bytes of the other ranks' K and V, which do not shrink as ranks are added."""
        model = cell.model
        return (cell.sp_degree - 1) * 2 * model.num_kv_heads * model.head_dim * DTYPE_BYTES[cell.dtype]

    def call_memory(self, cell: Cell) -> CallMemory:
        """Return the memory of gathered K and V, the wide partial output and, in backward, wide gradients.

        The largest of three is added: a block, with copies of keys of several ranks and the kernel's results;
        those results while they are cast to the wide dtype; and the results of the call while they are cast
        back, with gloo's copy of all gradients, which it all-reduces instead of scattering.
        """
        model = cell.model
        q, kv = activation_bytes(cell, model.num_heads), activation_bytes(cell, 2 * model.num_kv_heads)
        gathered, is_narrow = cell.sp_degree * kv, wide_bytes(cell, q) > q
        copied = wide_bytes(cell, gathered) if cell.cluster.backend == "gloo" else 0
        forward, backward = [is_narrow * q], [wide_bytes(cell, kv) + copied + is_narrow * (kv + q)]
        for is_local, is_copy, block in _blocks_of_end_ranks(cell):
            queries = tensor_bytes(cell, block.heads, block.queries)
            keys = tensor_bytes(cell, 2 * block.kv_heads, block.keys)
            repeated = tensor_bytes(cell, 2 * block.heads, block.keys) if kernel_repeats_kv(cell) else 0
            unallocated = wide_bytes(cell, q) if is_local else 0  # no partial output exists yet
            forward.append(
                queries + max(is_copy * keys + repeated, is_narrow * wide_bytes(cell, queries)) - unallocated
            )
            backward.append(queries + keys + is_copy * keys + 2 * repeated)
        saved = gathered + q + lse_bytes(cell)
        return CallMemory(
            forward=saved - q + wide_bytes(cell, q) + max(forward),
            saved=saved,
            backward=wide_bytes(cell, q + gathered) + max(backward),
        )


def _blocks_of_end_ranks(cell: Cell) -> Iterator[tuple[bool, bool, Block]]:
    """Yield (is on local keys, copies keys, block) of the kernel calls of the first and the last rank."""
    for rank in {0, cell.sp_degree - 1}:
        for index, (is_copy, block) in enumerate(blocks_of(cell, rank)):
            yield index == 0, is_copy, block


def blocks_of(cell: Cell, rank: int) -> Iterator[tuple[bool, Block]]:
    """Yield a rank's kernel calls, local keys first, with whether keys of several ranks are copied for it."""

    def tiles_of(source: int) -> tuple[Tile, ...]:
        tile = mask_tile(cell, cell.shard_len, rank, source)
        return () if tile is None else (tile,)

    model = cell.model
    for call in (*calls_on_own(tiles_of, rank), *calls_on_others(tiles_of, rank, cell.sp_degree)):
        queries, keys = (len(range(cell.shard_len)[part]) for part in (call.tile.queries, call.tile.keys))
        block = Block(
            cell.batch, model.num_heads, model.num_kv_heads, queries, call.ranks * keys, call.tile.causal
        )
        yield call.ranks > 1, block
