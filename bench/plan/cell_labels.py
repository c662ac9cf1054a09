"""Short labels that tell the cells of a sweep apart."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

from bench.common.labels import length_label
from bench.config import Cell

SELF_EXPLAINING = frozenset(
    {"data", "dtype", "engine", "hardware", "kernel", "layout", "loss", "model", "trainer", "workload"}
)
"""Settings whose values are clear without their key."""


class CellLabels:
    """Labels that distinguish the cells of a sweep: `ulysses 64k sp 2`, or `ulysses 64k sp 2 fsdp2`.

    A label has a setting, such as the engine, only if it distinguishes cells of one strategy, length and
    degree.
    """

    def __init__(self, cells: Iterable[Cell] = ()) -> None:
        self._cells_by_short: dict[str, dict[int, Cell]] = {}
        self._keys: dict[str, Sequence[str]] = {}
        self.add(cells)

    def add(self, cells: Iterable[Cell]) -> None:
        """Add cells, and distinguish their labels from one another and from those of earlier cells."""
        for cell in cells:  # the repeats of a cell are one object
            short = short_label(cell)
            self._cells_by_short.setdefault(short, {})[id(cell)] = cell
            self._keys.pop(short, None)

    def label(self, cell: Cell) -> str:
        """Return the label of one of the added cells."""
        short = short_label(cell)
        if short not in self._keys:
            same = self._cells_by_short[short].values()
            self._keys[short] = distinguishing_keys([other.flat() for other in same])
        if not self._keys[short]:
            return short
        flat = cell.flat()
        return " ".join([short, *(setting_label(key, flat.get(key)) for key in self._keys[short])])


def distinguishing_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the keys that distinguish the settings of cells, without keys that add no distinction.

    Equal settings stay equal. With a single cell the result is empty.
    """
    keys: list[str] = []
    distinct = 1
    for key in dict.fromkeys(chain.from_iterable(settings)):
        count = len({tuple(str(cell.get(name)) for name in (*keys, key)) for cell in settings})
        if count > distinct:
            keys.append(key)
            distinct = count
    return keys


def short_label(cell: Cell) -> str:
    """Return a cell's strategy, length and degree: `ulysses 64k sp 2`."""
    degree = f" sp {cell.sp_degree}" if cell.sp_degree > 1 else ""
    return f"{cell.strategy} {length_label(cell.seq_len)}{degree}"


def setting_label(key: str, value: Any) -> str:
    """Return the value alone, such as `zigzag`, or with its key, such as `batch=2`, if that is clearer."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if key in SELF_EXPLAINING else f"{key}={text}"
