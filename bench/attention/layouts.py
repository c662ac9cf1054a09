"""Which tokens of a sequence a rank holds. Slices only, so that facts and ranks read the same table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """A rule that deals a sequence out to ranks.

    `slices(seq_len, sp_degree, group_rank)` are the rank's pieces in its local order;
    `chunks_per_rank` is how many equal chunks a rank holds, so `seq_len` must divide by their total.
    """

    name: str
    chunks_per_rank: int
    slices: Callable[[int, int, int], tuple[slice, ...]]

    def length_multiple(self, sp_degree: int) -> int:
        return self.chunks_per_rank * sp_degree


def _contiguous(seq_len: int, sp_degree: int, group_rank: int) -> tuple[slice, ...]:
    shard = seq_len // sp_degree
    return (slice(group_rank * shard, (group_rank + 1) * shard),)


def _zigzag(seq_len: int, sp_degree: int, group_rank: int) -> tuple[slice, ...]:
    chunk = seq_len // (2 * sp_degree)
    mirror = 2 * sp_degree - 1 - group_rank
    return tuple(slice(i * chunk, (i + 1) * chunk) for i in (group_rank, mirror))


def _striped(seq_len: int, sp_degree: int, group_rank: int) -> tuple[slice, ...]:
    return (slice(group_rank, seq_len, sp_degree),)


LAYOUTS: Mapping[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("contiguous", 1, _contiguous),
        Layout("zigzag", 2, _zigzag),
        Layout("striped", 1, _striped),
    )
}
