"""Packed documents: where each one ends, and the tiles of a shard's attention that stay within documents.

No torch is needed, because the ends alone decide what a rank computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from bench.attention.layouts import Layout, Tile

CACHED_RING_STEPS = 64
"""Number of ring steps whose tiles are cached, because all layers use the same tiles in forward and
backward."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a batch of equally long sequences. Attention stays within each document."""

    ends: tuple[tuple[int, ...], ...]
    """Ends of the documents of each sequence, ascending; the last end is the length of the sequence."""

    @property
    def tokens(self) -> int:
        """Length of one sequence."""
        return self.ends[0][-1]

    @property
    def count(self) -> int:
        """Number of documents in all sequences."""
        return sum(map(len, self.ends))

    def positions_of(self, sequence: int) -> Iterator[range]:
        """Return the positions of each document of a sequence."""
        return (range(start, end) for start, end in pairwise((0, *self.ends[sequence])))

    def causal_pairs(self, pieces: Iterable[slice]) -> int:
        """Return the number of (query, key) pairs within documents that the causal mask leaves to a shard.

        Pairs are summed over all sequences of the batch, which are sharded alike.

        Args:
            pieces: Pieces of a sequence that make up the shard, as `Layout.slices` returns them.
        """
        pieces = tuple(pieces)
        return sum(
            visible_keys(positions, document.start)
            for sequence in range(len(self.ends))
            for document in self.positions_of(sequence)
            for _, positions in _document_pieces(pieces, document)
        )


def visible_keys(queries: range, first_key: int = 0) -> int:
    """Return the number of (query, key) pairs of queries at these positions under a causal mask.

    A query at position p sees the keys at positions `first_key` to p.
    """
    return (queries[0] + queries[-1] + 2 - 2 * first_key) * len(queries) // 2 if queries else 0


@lru_cache(CACHED_RING_STEPS)
def document_tiles(
    documents: Documents, layout: Layout, degree: int, rank: int, source: int
) -> tuple[Tile, ...]:
    """Return the tiles in which queries of ring rank `rank` see keys of ring rank `source`.

    No tile crosses a document boundary; a document may need several tiles.

    Args:
        documents: Documents of the batch.
        layout: Tokens that a ring rank holds.
        degree: Number of ring ranks.
        rank: Ring rank that holds the queries.
        source: Ring rank that holds the keys.
    """
    query_pieces, key_pieces = (
        layout.slices(documents.tokens, degree, ring_rank) for ring_rank in (rank, source)
    )
    return tuple(
        Tile(_shift(tile.queries, first_query), _shift(tile.keys, first_key), tile.causal, sequence)
        for sequence in range(len(documents.ends))
        for document in documents.positions_of(sequence)
        for first_query, queries in _document_pieces(query_pieces, document)
        for first_key, keys in _document_pieces(key_pieces, document)
        for tile in _visible_tiles(queries, keys)
    )


def _visible_tiles(queries: range, keys: range) -> Iterator[Tile]:
    """Yield one tile with the keys at or before each query, or none if no query sees a key.

    Both ranges have the same step, so that query i sees key j if j <= i + shift. Pieces of two shards are
    equal, disjoint or interleaved, so either all keys come before the queries, or the first key is at most
    one step away from the first query.
    """
    shift = (queries.start - keys.start) // queries.step
    if shift >= len(keys):
        yield Tile(slice(0, len(queries)), slice(0, len(keys)), causal=False)
        return
    square = min(len(queries) + shift, len(keys))
    if square > 0:
        yield Tile(slice(-shift, square - shift), slice(0, square), causal=True)


def _document_pieces(pieces: Iterable[slice], document: range) -> Iterator[tuple[int, range]]:
    """Yield the parts of a document in a shard: the first local index and the positions of each part."""
    piece_start = 0
    for piece in pieces:
        positions = range(piece.start, piece.stop, piece.step or 1)
        start, end = (
            min(len(positions), max(0, -(-(position - piece.start) // positions.step)))
            for position in (document.start, document.stop)
        )
        if start < end:
            yield piece_start + start, positions[start:end]
        piece_start += len(positions)


def _shift(part: slice, offset: int) -> slice:
    return slice(part.start + offset, part.stop + offset)
