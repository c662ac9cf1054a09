"""What one call of attention does on the rank with most to do: kernel calls, and what travels meanwhile.

A strategy's bytes, its time and its overlap all follow from this.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.attention.layouts import EVERYTHING, LAYOUTS, Tile
from bench.config import DTYPE_BYTES, Cell

WIDE_BYTES = 4
"""Of a number of a partial result or gradient; eight in float64."""


@dataclass(frozen=True, slots=True)
class Block:
    """One kernel call: so many queries of so many heads on so many keys."""

    sequences: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    is_causal: bool
    """Whether a query sees no later key; the last query sees all keys."""

    @property
    def pairs(self) -> int:
        """(Query, key) pairs that the mask leaves each head of each sequence."""
        hidden = self.queries * (self.queries - 1) // 2 if self.is_causal else 0
        return self.queries * self.keys - hidden

    @property
    def area(self) -> int:
        """Pairs of a query and a key that all heads of all sequences compute."""
        return self.sequences * self.heads * self.pairs


@dataclass(frozen=True, slots=True)
class Communication:
    """One call to the communication library."""

    kind: str
    """As the tap names it: all_to_all, send, all_gather or reduce_scatter."""
    sent_bytes: int
    """Payload that leaves this rank."""
    ranks: int
    """How many meet, in a send all those of the ring."""
    stride: int = 1
    """The difference of neighbours' ranks: those of a ring around Ulysses groups lie apart."""
    to_next: bool = False
    """Whether all goes to the next rank of those that meet, though the kind does not say so."""

    @property
    def span(self) -> int:
        """How many consecutive ranks hold all that meet."""
        return self.ranks * self.stride

    @property
    def is_even(self) -> bool:
        """Whether each rank sends the same to every other; else all goes to the next, as round a ring."""
        return self.kind == "all_to_all" and not self.to_next


@dataclass(frozen=True, slots=True)
class Stage:
    """What a rank computes, and what it sends beside."""

    blocks: tuple[Block, ...] = ()
    communications: tuple[Communication, ...] = ()
    is_hidden: bool = False
    """Whether the exchanges are under way while the blocks are computed; else they come after one another."""
    packed_bytes: int = 0
    """Written by copies before and after what is sent."""
    merged_bytes: int = 0
    """Of wide partial results or gradients that the blocks' are taken into."""
    held_bytes: int | None = None
    """Of tensors that came from others or go to them; None where that follows from what is sent."""

    @property
    def sent_bytes(self) -> int:
        return sum(exchange.sent_bytes for exchange in self.communications)


Stages = tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """One call of attention, one micro-step of one layer."""

    forward: Stages
    backward: Stages

    @property
    def forward_bytes(self) -> int:
        """Payload that one rank sends."""
        return sum(stage.sent_bytes for stage in self.forward)

    @property
    def backward_bytes(self) -> int:
        return sum(stage.sent_bytes for stage in self.backward)


def whole_block(cell: Cell, heads: int, kv_heads: int) -> Block:
    """Attention of these heads over whole sequences."""
    is_causal = cell.workload.mask == "causal"
    return Block(cell.batch, heads, kv_heads, cell.padded_len, cell.padded_len, is_causal)


def tile_of(cell: Cell, shard_len: int, rank: int, source: int) -> Tile | None:
    """What the cell's mask leaves the rank's queries of the source's keys, or None."""
    if cell.workload.mask != "causal":
        return EVERYTHING
    return LAYOUTS[cell.layout].causal_tile(shard_len, rank, source)


def ring_blocks(cell: Cell, heads: int, kv_heads: int) -> list[Block]:
    """Per ring step the kernel call of the last rank of the ring.

    In every layout it has as much to do in each ring step as any other, or more, and the others wait for it:
    the next keys come from a rank that is done with this step.
    """
    degree = cell.ring_degree
    rank, shard_len = degree - 1, cell.padded_len // degree
    blocks = []
    for source in range(rank, -1, -1):
        tile = tile_of(cell, shard_len, rank, source) or EVERYTHING
        queries, keys = (len(range(shard_len)[part]) for part in (tile.queries, tile.keys))
        blocks.append(Block(cell.batch, heads, kv_heads, queries, keys, tile.causal))
    return blocks


def tensor_bytes(cell: Cell, heads: int, tokens: int) -> int:
    """Bytes of a [batch, heads, tokens, head_dim] tensor in the cell's dtype."""
    return cell.batch * heads * tokens * cell.model.head_dim * DTYPE_BYTES[cell.dtype]


def wide(cell: Cell, size: int) -> int:
    """Bytes of a tensor of `size` bytes in the precision of partial results."""
    return size // DTYPE_BYTES[cell.dtype] * max(WIDE_BYTES, DTYPE_BYTES[cell.dtype])
