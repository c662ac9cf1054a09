"""One column of many rows: packed by the process that read them, joined by the one that asked for them.

Most settings are the same in all of a sweep's records. Handed over value by value, they take as long as the
numbers do.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

Columns = dict[str, Any]
"""By name an array, a list, or what is Same in all rows; of numbers an array of floats, missing ones NaN."""


@dataclass(frozen=True, slots=True)
class Same:
    """The one value of all rows."""

    value: Any


NO_SCALAR = frozenset({list, dict})
TEXT = frozenset({str, type(None)})
ALIKE = frozenset({str, bool, int, type(None)})
"""Types of which equal values are one and the same; 0.0 and -0.0 are not."""
PACKED: Mapping[type, type] = {bool: np.bool_, int: np.int64, float: np.float64}


def packed(column: list[Any]) -> Any:
    """The column made ready to be compared, and to be quickly handed from process to process."""
    kind = type(column[0])
    if kind in ALIKE and column.count(column[0]) == len(column) and {*map(type, column)} == {kind}:
        return Same(column[0])
    return value_by_value(column)


def value_by_value(column: list[Any]) -> Any:
    """The same, but value by value.

    What is no single value stands as its JSON. Numbers of one kind are an array, equal texts one object.
    """
    kinds = {*map(type, column)}
    if len(kinds) == 1 and kinds <= PACKED.keys():
        with suppress(OverflowError):  # an integer beyond 64 bits stays in a list
            return np.array(column, dtype=PACKED[kinds.pop()])
    if kinds & NO_SCALAR:
        return [*map(_comparable, column)]
    if str in kinds and kinds <= TEXT:  # beside others 1 and True would be one
        seen: dict[Any, Any] = {}
        return [*map(seen.setdefault, column, column)]
    return column


def numbers(column: Sequence[float | None]) -> npt.NDArray[np.float64]:
    """The column as an array, what is missing as NaN."""
    return np.array(column, dtype=np.float64)


def below(columns: Sequence[Any], counts: Sequence[int]) -> Any:
    """One column of parts that have so many rows each; None stands for one that a part lacks."""
    values = {(type(column.value), column.value) if isinstance(column, Same) else None for column in columns}
    if len(values) == 1 and None not in values:
        return columns[0]
    arrays = [each for each in map(_array, columns, counts) if each is not None]
    if len(arrays) == len(columns) and len({each.dtype for each in arrays}) == 1:
        return np.concatenate(arrays)
    return [*chain.from_iterable(map(_values, columns, counts))]


def _array(column: Any, count: int) -> npt.NDArray[Any] | None:
    """The rows' values as an array, what is missing as NaN; None where they are no numbers."""
    if column is None:
        return np.full(count, np.nan)
    if isinstance(column, Same):
        once = value_by_value([column.value])
        return np.repeat(once, count) if isinstance(once, np.ndarray) else None
    return column if isinstance(column, np.ndarray) else None


def _comparable(value: Any) -> Any:
    return json.dumps(value, sort_keys=True) if type(value) in NO_SCALAR else value


def _values(column: Any, count: int) -> Sequence[Any]:
    """The rows' values one by one."""
    if isinstance(column, np.ndarray):
        return column.tolist()  # type: ignore[no-any-return]
    if isinstance(column, Same):
        return [column.value] * count
    return [None] * count if column is None else column
