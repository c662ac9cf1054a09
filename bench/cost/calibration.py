"""What was measured on a machine: times by size, between which a prediction interpolates.

Times and sizes are interpolated by their logarithms. Beyond the largest size the rate stays that of the
largest, and the band widens; below the smallest the time does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.cost.band import Band, End

WIDENED_PER_DOUBLING = 1.1
"""How much further off the ends are for each doubling beyond what was measured. Assumed."""
MICROSECOND = 1e-6
CAUSAL_EXPONENT = 2
BUS_SHARE: Mapping[str, Callable[[int], float]] = {
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
    "send": lambda _: 1.0,
    "broadcast": lambda _: 1.0,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
}
"""Bus bandwidth over algorithm bandwidth, as nccl-tests defines them (its doc/PERFORMANCE.md)."""


@dataclass(frozen=True, slots=True)
class Table:
    """Times of one thing by its sizes."""

    axis: tuple[int, ...]
    """The first size, ascending."""
    entries: tuple[Band | Table, ...]
    """For each the time in seconds, or a table by the other sizes."""

    @classmethod
    def of(cls, rows: Sequence[Sequence[float]]) -> Table | Band:
        """From rows of sizes, then the times of all ends in microseconds."""
        if len(rows[0]) == len(End):
            return Band(*(MICROSECOND * each for each in rows[0]))
        by_size: dict[int, list[Sequence[float]]] = {}
        for first, *rest in rows:
            by_size.setdefault(int(first), []).append(rest)
        axis = tuple(sorted(by_size))
        return cls(axis, tuple(cls.of(by_size[size]) for size in axis))

    def time(self, sizes: Sequence[float], exponent: float = 1.0) -> Band:
        """The time of these sizes; `exponent` is that of the last size in the work."""
        (size, *rest), axis = sizes, self.axis
        size = max(size, axis[0])
        above = bisect_right(axis, size)
        if above == len(axis):
            ratio = size / axis[-1]
            power = 1.0 if rest else exponent
            return self._entry(-1, rest, exponent).scaled(
                ratio**power, WIDENED_PER_DOUBLING ** math.log2(ratio)
            )
        share = math.log(size / axis[above - 1]) / math.log(axis[above] / axis[above - 1])
        one, other = (self._entry(index, rest, exponent) for index in (above - 1, above))
        return Band(*(one.at(end) ** (1 - share) * other.at(end) ** share for end in End))

    def _entry(self, index: int, rest: Sequence[float], exponent: float) -> Band:
        entry = self.entries[index]
        return entry.time(rest, exponent) if isinstance(entry, Table) else entry


@dataclass(frozen=True, slots=True)
class Calibration:
    """All tables of one hardware file."""

    tables: Mapping[tuple[str, str], Table]
    """By what was measured, and its dtype."""

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Calibration:
        """From a file's `calibrated`: `tables` has a text of comma-separated lines per name and dtype."""
        tables = {}
        for key, text in facts["tables"].items():
            name, _, dtype = str(key).partition(" ")
            rows = [[float(each) for each in line.split(",")] for line in str(text).split()]
            table = Table.of(rows)
            assert isinstance(table, Table)
            tables[name, dtype] = table
        return cls(tables)

    def has(self, name: str, dtype: str) -> bool:
        return (name, dtype) in self.tables

    def time(self, name: str, dtype: str, sizes: Sequence[float], exponent: float = 1.0) -> Band:
        return self.tables[name, dtype].time(sizes, exponent)
