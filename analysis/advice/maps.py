"""What a figure of advice shows: who leads at which length and link, and how long a sequence may get."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from analysis.advice.option import Option
from analysis.advice.ranking import ranked
from bench.config import RunConfig
from bench.cost.fit import Fit
from bench.cost.hardware import Hardware
from bench.labels import KIB, MIB
from bench.strategies import STRATEGIES

MAP_STRATEGIES = ("local", "ulysses", "ring", "usp")
"""One implementation of each idea, where nobody names others."""
MAP_LENGTHS: Sequence[int] = tuple(8 * KIB * 2**step for step in range(8))
LINKS: Sequence[tuple[float, str]] = (
    (12.5e9, "100 Gb/s"),
    (25e9, "200 Gb/s"),
    (50e9, "400 Gb/s"),
    (100e9, "800 Gb/s"),
    (200e9, "1,600 Gb/s"),
    (450e9, "NVLink 4"),
    (900e9, "NVLink 5"),
)
"""Bytes per second of one device in one direction, and what has about as much."""
LONGEST = 64 * MIB
"""Beyond which nobody asks, in tokens."""

Fitting = Callable[[RunConfig], Fit | None]


@dataclass(frozen=True, slots=True)
class Leader:
    """Who comes first at one length and link bandwidth."""

    seq_len: int
    bytes_per_s: float
    strategy: str | None
    """None where nothing has room."""
    level: tuple[str, ...]
    """The strategies that it is not clearly ahead of, itself among them."""


@dataclass(frozen=True, slots=True)
class Reach:
    """How long a sequence one cell's strategy and degrees have room for, in tokens; 0 for none."""

    cell: RunConfig
    surely: int
    perhaps: int
    """The longest that is not known to run out."""


def with_link(hardware: Hardware, bytes_per_s: float) -> Hardware:
    """The same device with every link, within a node and between nodes, as fast as this."""
    return replace(
        hardware,
        node=replace(hardware.node, bytes_per_s=bytes_per_s),
        network=replace(hardware.network, bytes_per_s=bytes_per_s),
    )


def leader(seq_len: int, bytes_per_s: float, options: Iterable[Option]) -> Leader:
    """Of these options at this length and bandwidth."""
    ranking = ranked(options)
    lead = ranking.fastest
    if lead is None:
        return Leader(seq_len, bytes_per_s, None, ())
    strategies = (each.cell.strategy for each in (lead, *ranking.level(lead)))
    return Leader(seq_len, bytes_per_s, lead.cell.strategy, tuple(dict.fromkeys(strategies)))


def reaches(cells: Iterable[RunConfig], fitting: Fitting) -> Iterator[Reach]:
    """By halving; memory grows with length."""
    for cell in cells:
        surely = _longest(cell, lambda each: fitting(each) is Fit.FITS)
        perhaps = _longest(cell, lambda each: fitting(each) in (Fit.FITS, Fit.UNDECIDED))
        yield Reach(cell, surely, perhaps)


def one_of_each_degree(cells: Iterable[RunConfig]) -> list[RunConfig]:
    """Of a hybrid, whose ulysses_degree hardly changes its memory, one cell for each sp_degree."""
    kept: dict[tuple[object, ...], RunConfig] = {}
    for cell in cells:
        kept[cell.strategy, cell.layout, cell.options, cell.sp_degree, cell.dp_shard] = cell
    return [*kept.values()]


def _longest(cell: RunConfig, has_room: Callable[[RunConfig], bool]) -> int:
    """In whole multiples of what the layout needs, and of 1k."""
    unit = math.lcm(KIB, STRATEGIES[cell.strategy].length_multiple(cell))
    low, high = 0, LONGEST // unit
    while low < high:
        middle = (low + high + 1) // 2
        if has_room(replace(cell, seq_len=middle * unit, padding=0)):
            low = middle
        else:
            high = middle - 1
    return low * unit
