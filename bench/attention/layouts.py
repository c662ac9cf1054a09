"""Which tokens of a sequence a rank holds, and which of them see each other across ranks.

Slices only, so that facts and ranks read the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Tile:
    """The part of one ring step that a mask leaves: these queries of a shard on those keys of another."""

    queries: slice
    keys: slice
    causal: bool
    """Whether a query sees its own and earlier keys only; there are equally many of both."""
    sequence: int | None = None
    """Of which sequence of the batch; None where it is the same of all."""

    @property
    def sequences(self) -> slice:
        """Of which sequences of the batch."""
        return ALL if self.sequence is None else slice(self.sequence, self.sequence + 1)


EVERYTHING = Tile(ALL, ALL, causal=False)
TRIANGLE = Tile(ALL, ALL, causal=True)


@dataclass(frozen=True, slots=True)
class Layout:
    """Which tokens of a sequence each rank holds."""

    name: str
    chunks_per_rank: int
    """How many equal chunks a rank holds: `seq_len` must be a multiple of their total."""
    slices: Callable[[int, int, int], tuple[slice, ...]]
    """`slices(seq_len, degree, rank)` are the rank's pieces of a sequence, in its local order."""
    causal_tile: Callable[[int, int, int], Tile | None]
    """`causal_tile(shard_len, rank, source)`: what the rank's queries see of the source's keys, or None."""

    def length_multiple(self, degree: int) -> int:
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
    """Always half of the shard's square: the causal work of every rank and ring step is the same."""
    if source == rank:
        return TRIANGLE
    half = shard_len // 2
    if source < rank:
        return Tile(ALL, slice(0, half), causal=False)
    return Tile(slice(half, shard_len), ALL, causal=False)


def _striped(seq_len: int, degree: int, rank: int) -> tuple[slice, ...]:
    return (slice(rank, seq_len, degree),)


def _striped_tile(shard_len: int, rank: int, source: int) -> Tile | None:
    """Stripe i of a later rank lies behind stripe i of an earlier one (arXiv:2311.09431, section 3)."""
    if source <= rank:
        return TRIANGLE
    return Tile(slice(1, shard_len), slice(0, shard_len - 1), causal=True) if shard_len > 1 else None


def cut(pieces: tuple[slice, ...], seq_len: int, start: int, stop: int) -> tuple[slice, ...]:
    """The pieces that hold local tokens start..stop of a shard made of `pieces`."""
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
