"""Which kernel calls attend to gathered keys: as few as the mask allows. No torch, as facts count them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from bench.attention.layouts import Tile

TilesOf = Callable[[int], Sequence[Tile]]
"""What the mask leaves of a rank's keys, by its number."""


@dataclass(frozen=True, slots=True)
class Call:
    """The keys of one kernel call: of these ranks, one after another, what the mask leaves of each."""

    sources: slice
    tile: Tile

    @property
    def ranks(self) -> int:
        """How many ranks' keys these are."""
        return int(self.sources.stop - self.sources.start)


def calls_on_own(tiles_of: TilesOf, rank: int) -> list[Call]:
    """Those on the rank's own keys, of which every query sees some."""
    return [*_calls(tiles_of, range(rank, rank + 1))]


def calls_on_others(tiles_of: TilesOf, rank: int, ranks: int) -> list[Call]:
    """Those on all other ranks' keys.

    Neighbours of which the mask leaves the same, and no triangle, are taken at once: in contiguous and zigzag
    layout all earlier ranks are, and all later ones, whatever their number.
    """
    return [*_calls(tiles_of, range(rank)), *_calls(tiles_of, range(rank + 1, ranks))]


def _calls(tiles_of: TilesOf, sources: range) -> Iterator[Call]:
    for tiles, group in groupby(sources, key=lambda source: tuple(tiles_of(source))):
        first, *others = group
        after = first + 1 + len(others)
        for tile in tiles:
            at_once = 1 if tile.causal else after - first
            for start in range(first, after, at_once):
                yield Call(slice(start, start + at_once), tile)
