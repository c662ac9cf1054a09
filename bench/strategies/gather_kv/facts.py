"""Facts of `gather_kv`, which all-gathers K and V and reduce-scatters their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

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
"""Function from the number of a source rank to the tiles that the mask leaves of its keys."""


@dataclass(frozen=True, slots=True)
class KernelCall:
    """Kernel call on the keys of consecutive ranks, from each of which the mask leaves the same tile."""

    sources: slice
    """Numbers of the ranks that hold the keys."""
    tile: Tile
    """Queries of the rank that computes, and keys of each rank in `sources`."""

    @property
    def ranks(self) -> int:
        """Number of ranks in `sources`."""
        return int(self.sources.stop - self.sources.start)


def calls_on_local_keys(tiles_of: TilesOf, rank: int) -> list[KernelCall]:
    """Return the kernel calls on a rank's local keys, of which every query sees at least one."""
    return [*_calls(tiles_of, range(rank, rank + 1))]


def calls_on_other_keys(tiles_of: TilesOf, rank: int, ranks: int) -> list[KernelCall]:
    """Return the kernel calls on the keys of all other ranks.

    One call takes the keys of all consecutive ranks with the same tile, unless the tile is a triangle. In the
    contiguous and zigzag layouts one call therefore takes all earlier ranks, and one all later ranks that the
    mask leaves.
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
        those of the last rank. In every layout, no other rank has more work.
        """
        heads, kv_heads, ranks = cell.model.num_heads, cell.model.num_kv_heads, cell.sp_degree
        local, *others = (call.block for call in planned_calls(cell, ranks - 1))
        kv_bytes = activation_bytes(cell, 2 * kv_heads)
        gathered = Communication("all_gather", (ranks - 1) * kv_bytes, ranks)
        scattered = Communication("reduce_scatter", (ranks - 1) * wide_bytes(cell, kv_bytes), ranks)
        merged = sum(tensor_bytes(cell, heads, block.queries) for block in others)
        gradients = sum(
            tensor_bytes(cell, heads, block.queries) + tensor_bytes(cell, 2 * kv_heads, block.keys)
            for block in (local, *others)
        )
        return Schedule(
            forward=(
                Stage((local,), (gathered,), is_hidden=True, packed_bytes=kv_bytes),
                Stage(tuple(others), merged_bytes=wide_bytes(cell, merged)),
            ),
            backward=(
                Stage((local, *others), merged_bytes=wide_bytes(cell, gradients)),
                Stage(communications=(scattered,)),
            ),
        )

    def saved_bytes_per_token(self, cell: Cell) -> int:
        """Return the bytes of the other ranks' K and V, per token of a rank's shard."""
        model = cell.model
        return (cell.sp_degree - 1) * 2 * model.num_kv_heads * model.head_dim * DTYPE_BYTES[cell.dtype]

    def call_memory(self, cell: Cell) -> CallMemory:
        """Return the memory of gathered K and V, and of the partial output or, in backward, of the gradients.

        The partial output and the gradients have the wide dtype, which is float32, or float64 for float64.
        The largest of three peaks is added: one kernel call, with copies of the keys of several ranks and
        with its results; these results and their cast to the wide dtype; and the cast of the final results
        back, with gloo's copy of all gradients, which it all-reduces instead of scattering.
        """
        model = cell.model
        q, kv = activation_bytes(cell, model.num_heads), activation_bytes(cell, 2 * model.num_kv_heads)
        gathered, is_narrow = cell.sp_degree * kv, wide_bytes(cell, q) > q
        copied = wide_bytes(cell, gathered) if cell.cluster.backend == "gloo" else 0
        forward, backward = [is_narrow * q], [wide_bytes(cell, kv) + copied + is_narrow * (kv + q)]
        for call in (call for rank in {0, cell.sp_degree - 1} for call in planned_calls(cell, rank)):
            block, is_copy = call.block, call.copies_keys
            queries = tensor_bytes(cell, block.heads, block.queries)
            keys = tensor_bytes(cell, 2 * block.kv_heads, block.keys)
            repeated = tensor_bytes(cell, 2 * block.heads, block.keys) if kernel_repeats_kv(cell) else 0
            unallocated = wide_bytes(cell, q) if call.is_first else 0  # no partial output exists yet
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


class PlannedCall(NamedTuple):
    """Block of one kernel call of a rank, with what the memory estimate needs to know of it."""

    block: Block
    is_first: bool
    """Whether the rank makes this call first, on its local keys."""
    copies_keys: bool
    """Whether the keys of several ranks are copied into one tensor for it."""


def planned_calls(cell: Cell, rank: int) -> Iterator[PlannedCall]:
    """Yield a rank's kernel calls, of which the first is on its local keys."""

    def tiles_of(source: int) -> tuple[Tile, ...]:
        tile = mask_tile(cell, cell.shard_len, rank, source)
        return () if tile is None else (tile,)

    model = cell.model
    calls = (*calls_on_local_keys(tiles_of, rank), *calls_on_other_keys(tiles_of, rank, cell.sp_degree))
    for index, call in enumerate(calls):
        queries, keys = (len(range(cell.shard_len)[part]) for part in (call.tile.queries, call.tile.keys))
        block = Block(
            cell.batch, model.num_heads, model.num_kv_heads, queries, call.ranks * keys, call.tile.causal
        )
        yield PlannedCall(block, is_first=index == 0, copies_keys=call.ranks > 1)
