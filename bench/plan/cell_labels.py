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
"""Settings whose values say by themselves what they are of."""


class CellLabels:
    """The labels of a sweep's cells: `ulysses 64k sp 2`, or `ulysses 64k sp 2 fsdp2` beside one of `ddp`."""

    def __init__(self, cells: Iterable[Cell] = ()) -> None:
        self._alike: dict[str, dict[int, Cell]] = {}
        self._keys: dict[str, Sequence[str]] = {}
        self.add(cells)

    def add(self, cells: Iterable[Cell]) -> None:
        """Tell these apart too, from one another and from those before."""
        for cell in cells:  # the repeats of a cell are one object
            short = short_label(cell)
            self._alike.setdefault(short, {})[id(cell)] = cell
            self._keys.pop(short, None)

    def of(self, cell: Cell) -> str:
        """This cell's label."""
        short = short_label(cell)
        if short not in self._keys:
            self._keys[short] = telling_keys([each.flat() for each in self._alike[short].values()])
        if not self._keys[short]:
            return short
        flat = cell.flat()
        return " ".join([short, *(setting(key, flat.get(key)) for key in self._keys[short])])


def telling_keys(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """The settings that tell these apart; none that differs only where one before it does."""
    keys: list[str] = []
    told_apart = 1
    for key in dict.fromkeys(chain.from_iterable(settings)):
        distinct = len({tuple(str(each.get(name)) for name in (*keys, key)) for each in settings})
        if distinct > told_apart:
            keys.append(key)
            told_apart = distinct
    return keys


def short_label(cell: Cell) -> str:
    """Return a cell's strategy, length and degree: `ulysses 64k sp 2`."""
    degree = f" sp {cell.sp_degree}" if cell.sp_degree > 1 else ""
    return f"{cell.strategy} {length_label(cell.seq_len)}{degree}"


def setting(key: str, value: Any) -> str:
    """`zigzag`, or `batch=2` where the value does not say what it is of."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if key in SELF_EXPLAINING else f"{key}={text}"
