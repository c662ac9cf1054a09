"""The summary for programs: every column as CSV, of 100,000 cells within a second or two."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby
from typing import Any

import msgspec
import pandas as pd

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
BETWEEN_VALUES = "\x1f"
NEED_CARE = ('"', ",", "\r", "\n", *(f"{BETWEEN_VALUES}{start}" for start in FORMULA_STARTS))
"""What a column's texts, each after BETWEEN_VALUES, hold if any of them may not be written as it is."""


def csv_text(summary: pd.DataFrame) -> str:
    """All columns of the summary; missing is empty, and no text cell is a spreadsheet formula."""
    columns = (summary[name] for name in summary.columns)
    lines = map(",".join, zip(*_written(columns, len(summary)), strict=True))
    return "\n".join([",".join(map(_cell, summary.columns)), *lines, ""])


def _written(columns: Iterable[pd.Series[Any]], count: int) -> Iterator[Sequence[str]]:
    """The cells by column, `count` in each; neighbours that are the same in every row stand in one."""
    for is_same, neighbours in groupby(columns, _is_same):
        if is_same:
            once = _varied(column.iloc[:1] for column in neighbours)
            yield [",".join(chain.from_iterable(once))] * count
        else:
            yield from _varied(neighbours)


def _varied(columns: Iterable[pd.Series[Any]]) -> Iterator[Sequence[str]]:
    """The cells by column; neighbours that hold numbers stand in one, for millions of texts take long."""
    for is_number, neighbours in groupby(columns, _is_number):
        if is_number:
            yield _numbers(neighbours)
        else:
            yield from map(_texts, neighbours)


def _is_same(column: pd.Series[Any]) -> bool:
    """Whether all its cells are written the same way; not asked of values of several kinds: 1 equals True."""
    if column.empty or pd.isna(column.iloc[0]):
        return bool(column.isna().all())
    return column.dtype != object and bool(column.eq(column.iloc[0]).all())


def _is_number(column: pd.Series[Any]) -> bool:
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def _numbers(columns: Iterable[pd.Series[Any]]) -> list[str]:
    """Rows of numbers: whole bytes, nothing where missing."""
    rows = [*zip(*map(_values, columns), strict=True)]
    written = msgspec.json.encode(rows).decode()  # NaN is null
    return written[2:-2].replace("null", "").split("],[")


def _values(column: pd.Series[Any]) -> list[Any]:
    numbers: list[Any] = column.tolist()
    if not str(column.name).endswith("_bytes"):
        return numbers
    return [None if math.isnan(number) else round(number) for number in numbers]


def _texts(column: pd.Series[Any]) -> list[str]:
    """A column's cells as CSV has them, nothing where missing."""
    if column.dtype == "str":
        texts: list[str] = column.fillna("").tolist()
        together = BETWEEN_VALUES.join(["", *texts])
        if not any(sign in together for sign in NEED_CARE):
            return texts
    values = column.astype(object).where(column.notna(), None).tolist()
    keys = [*zip(map(type, values), values, strict=True)]  # 1 and True are equal
    written = {key: "" if key[1] is None else _cell(key[1]) for key in dict.fromkeys(keys)}
    return [*map(written.__getitem__, keys)]


def _cell(value: Any) -> str:
    """In quotes where it holds what CSV gives a meaning to (RFC 4180, section 2); no text is a formula."""
    text = f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else str(value)
    return '"{}"'.format(text.replace('"', '""')) if re.search(r'[",\r\n]', text) else text
