"""Layouts: the tokens of a sequence that each rank holds, and the causal mask between two ranks' tokens.

Tokens are given as slices, without torch. Ranks and the code that plans cells therefore use the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

ALL = slice(None)
"""All tokens of a shard, or all sequences of a batch."""


@dataclass(frozen=True, slots=True)
class Tile:
    """The queries and keys of one kernel call in a ring step, and which of them the causal mask leaves.

    Args:
        queries: Local indices of the queries in the shard of the rank that computes.
        keys: Local indices of the keys in the shard of the rank that sent them.
        causal: Whether query i of the tile sees keys 0 to i of the tile only. The tile then has as many keys
            as queries. Otherwise every query sees every key.
        sequence: Number of the sequence in the batch; None if the tile applies to all sequences.
    """

    queries: slice
    keys: slice
    causal: bool
    sequence: int | None = None

    @property
    def sequences(self) -> slice:
        """Sequences of the batch that the tile applies to."""
        return ALL if self.sequence is None else slice(self.sequence, self.sequence + 1)


EVERYTHING = Tile(ALL, ALL, causal=False)
"""Tile in which every query of a shard sees every key."""
TRIANGLE = Tile(ALL, ALL, causal=True)
"""Tile of a shard's queries on its own keys."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Rule that says which tokens of a sequence each rank holds."""

    name: str
    chunks_per_rank: int
    """Number of equal chunks that a rank holds. `seq_len` must be a multiple of the chunks of all ranks."""
    slices: Callable[[int, int, int], tuple[slice, ...]]
    """`slices(seq_len, degree, rank)` returns the rank's pieces of a sequence, in local order."""
    causal_tile: Callable[[int, int, int], Tile | None]
    """`causal_tile(shard_len, rank, source)` returns the tile of the queries of `rank` on the keys of
    `source`, or None if the causal mask leaves nothing."""

    def length_multiple(self, degree: int) -> int:
        """Return the number that `seq_len` must be a multiple of on `degree` ranks."""
        return self.chunks_per_rank * degree


def _contiguous(seq_len: int, degree: int, rank: int) -> tuple[slice, ...]:
    shard = seq_len // degree
    return (slice(rank * shard, (rank + 1) * shard),)


def _contiguous_tile(shard_len: int, rank: int, source: int) -> Tile | None:  # noqa: ARG001
    if source == rank:
        return TRIANGLE
    return EVERYTHING if source < rank else None


def _zigzag(seq_len: int, degree: int, rank: int) -> tuple[slice, ...]:
    chunk = seq_len // (2 * degree)
    mirror = 2 * degree - 1 - rank
    return tuple(slice(i * chunk, (i + 1) * chunk) for i in (rank, mirror))


def _zigzag_tile(shard_len: int, rank: int, source: int) -> Tile | None:
    """Return a tile of half the queries or half the keys, so that all ranks compute equally much at once."""
    if source == rank:
        return TRIANGLE
    half = shard_len // 2
    if source < rank:
        return Tile(ALL, slice(0, half), causal=False)
    return Tile(slice(half, shard_len), ALL, causal=False)


def _striped(seq_len: int, degree: int, rank: int) -> tuple[slice, ...]:
    return (slice(rank, seq_len, degree),)


def _striped_tile(shard_len: int, rank: int, source: int) -> Tile | None:
    """Return a causal tile, because ranks hold interleaved tokens (arXiv:2311.09431, section 3).

    Token i of a rank comes after token i of every lower rank.
    """
    if source <= rank:
        return TRIANGLE
    return Tile(slice(1, shard_len), slice(0, shard_len - 1), causal=True) if shard_len > 1 else None


def cut_pieces(pieces: tuple[slice, ...], seq_len: int, start: int, stop: int) -> tuple[slice, ...]:
    """Return the pieces of a sequence that contain the local tokens `start` to `stop` of a shard.

    Args:
        pieces: Pieces of the sequence that make up the shard.
        seq_len: Length of the sequence.
        start: First local token.
        stop: Local token after the last.
    """
    parts = []
    for piece in pieces:
        tokens = range(seq_len)[piece]
        part = tokens[max(start, 0) : max(stop, 0)]
        if part:
            parts.append(slice(part.start, part.stop, part.step))
        start, stop = start - len(tokens), stop - len(tokens)
    return tuple(parts)


LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("contiguous", 1, _contiguous, _contiguous_tile),
        Layout("zigzag", 2, _zigzag, _zigzag_tile),
        Layout("striped", 1, _striped, _striped_tile),
    )
}
