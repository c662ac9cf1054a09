"""Where the documents of packed sequences end, and which keys of a shard its queries see within them.

No torch: what a rank computes, and how much of it, is known from the ends alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from bench.attention.layouts import Layout, Tile

CACHED_BATCHES = 64
"""Ring steps whose tiles are kept: every layer asks for them again, forward and backward."""


@dataclass(frozen=True, slots=True)
class Documents:
    """The documents of a batch of equally long sequences; no token sees one of another document."""

    ends: tuple[tuple[int, ...], ...]
    """By sequence where each document ends, ascending; the last end is the sequence's length."""

    @property
    def tokens(self) -> int:
        """Of each sequence."""
        return self.ends[0][-1]

    @property
    def count(self) -> int:
        """Of all sequences."""
        return sum(map(len, self.ends))

    def of(self, sequence: int) -> Iterator[range]:
        """The positions of each document of a sequence."""
        return (range(start, end) for start, end in pairwise((0, *self.ends[sequence])))

    def causal_pairs(self, pieces: Iterable[slice]) -> int:
        """(Query, key) pairs that the mask leaves a shard made of these pieces, over all sequences."""
        pieces = tuple(pieces)
        return sum(
            keys_seen(held, document.start)
            for sequence in range(len(self.ends))
            for document in self.of(sequence)
            for _, held in _held(pieces, document)
        )


def keys_seen(queries: range, first: int = 0) -> int:
    """How many keys queries at these positions see, from `first` to their own."""
    return (queries[0] + queries[-1] + 2 - 2 * first) * len(queries) // 2 if queries else 0


@lru_cache(CACHED_BATCHES)
def document_tiles(
    documents: Documents, layout: Layout, degree: int, rank: int, source: int
) -> tuple[Tile, ...]:
    """What a ring rank's queries see of the source's keys, a few tiles a document.

    Pieces of both shards advance by the same step, so within a document they make squares, causal or full:
    those of a striped layout are as those of a contiguous one.
    """
    queries, keys = (layout.slices(documents.tokens, degree, each) for each in (rank, source))
    return tuple(
        Tile(_moved(tile.queries, first_query), _moved(tile.keys, first_key), tile.causal, sequence)
        for sequence in range(len(documents.ends))
        for document in documents.of(sequence)
        for first_query, queried in _held(queries, document)
        for first_key, seen in _held(keys, document)
        for tile in _seen(queried, seen)
    )


def _seen(queries: range, keys: range) -> Iterator[Tile]:
    """The keys at or before each query, as one tile or none; both ranges advance by the same step.

    Query i sees key j where j <= i + shift. Pieces of shards are the same, apart or interleaved, so either
    all keys come before the queries, or the first key is at most a step away from the first query.
    """
    shift = (queries.start - keys.start) // queries.step
    if shift >= len(keys):
        yield Tile(slice(0, len(queries)), slice(0, len(keys)), causal=False)
        return
    square = min(len(queries) + shift, len(keys))
    if square > 0:
        yield Tile(slice(-shift, square - shift), slice(0, square), causal=True)


def _held(pieces: Iterable[slice], document: range) -> Iterator[tuple[int, range]]:
    """A document's tokens in a shard, piece by piece: where there they begin, and their positions."""
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


def _moved(part: slice, by: int) -> slice:
    return slice(part.start + by, part.stop + by)
