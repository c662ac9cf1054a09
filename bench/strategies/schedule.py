"""Schedule of one call of attention on the rank with most work: its kernel calls and its communication.

The bytes, the time and the overlap of a strategy follow from it.
"""

from __future__ import annotations

from dataclasses import dataclass

from bench.attention.layouts import EVERYTHING, LAYOUTS, Tile
from bench.config import DTYPE_BYTES, Cell

WIDE_NUMBER_BYTES = 4
"""Bytes of one number in float32, the wide dtype in which partial results and gradients are summed.

Cells in float64 sum in float64, which has 8.
"""


@dataclass(frozen=True, slots=True)
class Block:
    """One kernel call: attention of some queries to some keys."""

    sequences: int
    """Number of sequences of the batch."""
    heads: int
    """Number of query heads."""
    kv_heads: int
    """Number of KV heads."""
    queries: int
    """Number of queries of one sequence."""
    keys: int
    """Number of keys of one sequence."""
    is_causal: bool
    """Whether the causal mask applies, in which the last query attends to all keys of the block."""

    @property
    def pairs(self) -> int:
        """Number of query-key pairs of one head of one sequence that the mask leaves."""
        hidden = self.queries * (self.queries - 1) // 2 if self.is_causal else 0
        return self.queries * self.keys - hidden

    @property
    def area(self) -> int:
        """Number of query-key pairs of all heads of all sequences that the mask leaves."""
        return self.sequences * self.heads * self.pairs


@dataclass(frozen=True, slots=True)
class Communication:
    """One collective, or one send and receive, of a process group.

    A ring hop of K and V on 4 ranks, for example:

        Communication("send", activation_bytes(cell, 2 * cell.model.num_kv_heads), 4)
    """

    kind: str
    """Kind of call: all_to_all, send, all_gather, all_reduce or reduce_scatter."""
    sent_bytes: int
    """Payload that this rank sends to other ranks."""
    ranks: int
    """Number of ranks of the process group; for a send, of the ring."""
    stride: int = 1
    """Difference between the numbers of neighbouring ranks; above 1 in a ring of Ulysses groups."""
    to_next: bool = False
    """Whether an all-to-all sends its whole payload to the next rank, as a send does."""

    @property
    def span(self) -> int:
        """Number of consecutive ranks that include the whole process group."""
        return self.ranks * self.stride

    @property
    def is_even(self) -> bool:
        """Whether a rank sends the same amount to every other rank, not all of it to the next one."""
        return self.kind == "all_to_all" and not self.to_next


@dataclass(frozen=True, slots=True)
class Stage:
    """Blocks that a rank computes, and the communication during or after them."""

    blocks: tuple[Block, ...] = ()
    """Kernel calls, in order."""
    communications: tuple[Communication, ...] = ()
    """Collectives and sends, in order."""
    is_hidden: bool = False
    """Whether communication runs while the blocks are computed; if not, one follows the other."""
    packed_bytes: int = 0
    """Bytes that copies write before and after communication."""
    merged_bytes: int = 0
    """Bytes of wide partial results or gradients into which the results of the blocks are added."""
    buffer_bytes: int | None = None
    """Bytes of the communication buffers; None derives them from `communications`."""

    @property
    def sent_bytes(self) -> int:
        """Payload that this rank sends in the stage."""
        return sum(communication.sent_bytes for communication in self.communications)


Stages = tuple[Stage, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Stages of one call of attention: one layer of one micro-step."""

    forward: Stages
    backward: Stages

    @property
    def forward_bytes(self) -> int:
        """Payload that one rank sends in forward."""
        return sum(stage.sent_bytes for stage in self.forward)

    @property
    def backward_bytes(self) -> int:
        """Payload that one rank sends in backward."""
        return sum(stage.sent_bytes for stage in self.backward)


def whole_block(cell: Cell, heads: int, kv_heads: int) -> Block:
    """Return the kernel call of these heads over whole sequences."""
    is_causal = cell.workload.mask == "causal"
    return Block(cell.batch, heads, kv_heads, cell.padded_len, cell.padded_len, is_causal)


def mask_tile(cell: Cell, shard_len: int, rank: int, source: int) -> Tile | None:
    """Return the tile that the cell's mask leaves of the queries of `rank` and the keys of `source`.

    Returns:
        None if the mask leaves nothing.
    """
    if cell.workload.mask != "causal":
        return EVERYTHING
    return LAYOUTS[cell.layout].causal_tile(shard_len, rank, source)


def ring_blocks(cell: Cell, heads: int, kv_heads: int) -> list[Block]:
    """Return the kernel call of every ring step on the last rank of the ring.

        >>> [block.is_causal for block in bench.ring_blocks(cell, heads=4, kv_heads=2)]
        [True, False]

    In every layout and ring step, no other rank has more work than the last one. The other ranks wait for it,
    because a rank passes on keys only after it has finished the ring step. `heads` and `kv_heads` are those
    that a rank computes.
    """
    degree = cell.ring_degree
    rank, shard_len = degree - 1, cell.padded_len // degree
    blocks = []
    for source in range(rank, -1, -1):
        tile = mask_tile(cell, shard_len, rank, source) or EVERYTHING
        queries, keys = (len(range(shard_len)[part]) for part in (tile.queries, tile.keys))
        blocks.append(Block(cell.batch, heads, kv_heads, queries, keys, tile.causal))
    return blocks


def tensor_bytes(cell: Cell, heads: int, tokens: int) -> int:
    """Return the bytes of a [batch, heads, tokens, head_dim] tensor in the cell's dtype."""
    return cell.batch * heads * tokens * cell.model.head_dim * DTYPE_BYTES[cell.dtype]


def wide_bytes(cell: Cell, size: int) -> int:
    """Return the bytes of a tensor of `size` bytes after a cast to float32, or to float64 from float64."""
    return size // DTYPE_BYTES[cell.dtype] * max(WIDE_NUMBER_BYTES, DTYPE_BYTES[cell.dtype])
