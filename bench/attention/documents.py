"""Packed documents: where each one ends, and the tiles of a shard's attention that stay within documents.

No torch is needed, because the ends alone decide what a rank computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from bench.attention.layouts import Layout, Tile

CACHED_BATCHES = 64
"""Number of ring steps whose tiles are cached, as every layer needs them again in forward and in backward."""


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
        """Return the number of (query, key) pairs that the mask leaves to a shard.

        Args:
            pieces: Pieces of a sequence that make up the shard, as `Layout.slices` returns them. All
                sequences of the batch are sharded alike, and their pairs are added up.
        """
        pieces = tuple(pieces)
        return sum(
            visible_keys(positions, document.start)
            for sequence in range(len(self.ends))
            for document in self.positions_of(sequence)
            for _, positions in _document_pieces(pieces, document)
        )


def visible_keys(queries: range, first: int = 0) -> int:
    """Return the number of keys from position `first` on that queries at these positions see, added up."""
    return (queries[0] + queries[-1] + 2 - 2 * first) * len(queries) // 2 if queries else 0


@lru_cache(CACHED_BATCHES)
def document_tiles(
    documents: Documents, layout: Layout, degree: int, rank: int, source: int
) -> tuple[Tile, ...]:
    """Return the tiles of one ring step: the queries of `rank` on the keys of `source`, both ring ranks.

    There are a few tiles for each document. Pieces of both shards have the same stride, so that tiles within
    a document are causal or full squares; tiles of a striped layout are those of a contiguous one.

    Args:
        documents: Documents of the batch.
        layout: Tokens that a ring rank holds.
        degree: Number of ring ranks.
        rank: Ring rank that holds the queries.
        source: Ring rank that holds the keys.
    """
    query_pieces, key_pieces = (layout.slices(documents.tokens, degree, number) for number in (rank, source))
    return tuple(
        Tile(_shift(tile.queries, first_query), _shift(tile.keys, first_key), tile.causal, sequence)
        for sequence in range(len(documents.ends))
        for document in documents.positions_of(sequence)
        for first_query, queries in _document_pieces(query_pieces, document)
        for first_key, keys in _document_pieces(key_pieces, document)
        for tile in _visible_tiles(queries, keys)
    )


def _visible_tiles(queries: range, keys: range) -> Iterator[Tile]:
    """Yield one tile with the keys at or before each query, or none. Both ranges have the same step.

    Query i sees key j if j <= i + shift. Pieces of two shards are equal, disjoint or interleaved, so either
    all keys come before the queries, or the first key is at most one step away from the first query.
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
    start = 0
    for piece in pieces:
        positions = range(piece.start, piece.stop, piece.step or 1)
        before, last = (
            min(len(positions), max(0, -(-(end - piece.start) // positions.step)))
            for end in (document.start, document.stop)
        )
        if before < last:
            yield start + before, positions[before:last]
        start += len(positions)


def _shift(part: slice, offset: int) -> slice:
    return slice(part.start + offset, part.stop + offset)
