"""The summary for programs: every column as CSV, of 100,000 cells within a second or two."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
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
    # Half the time of the csv module, a quarter of pandas'.
    lines = map(",".join, zip(*_columns(summary), strict=True))
    return "\n".join([",".join(map(_cell, summary.columns)), *lines, ""])


def _columns(summary: pd.DataFrame) -> Iterator[Sequence[str]]:
    """The cells by column; neighbours that are the same in every row, as most settings are, stand in one."""
    columns = (summary[name] for name in summary.columns)
    for is_same, neighbours in groupby(columns, _is_same):
        if is_same:
            once = (_column(column.iloc[:1]) for column in neighbours)
            yield [",".join(chain.from_iterable(once))] * len(summary)
        else:
            yield from map(_column, neighbours)


def _is_same(column: pd.Series[Any]) -> bool:
    """Whether all its cells are written the same way; not asked of values of several kinds: 1 equals True."""
    if column.isna().all():
        return True
    return column.dtype != object and bool(column.eq(column.iloc[0]).all())


def _column(column: pd.Series[Any]) -> list[str]:
    """A column's cells as CSV has them: whole bytes, nothing where missing."""
    if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
        return _numbers(column)
    if column.dtype == "str":
        texts: list[str] = column.fillna("").tolist()
        together = BETWEEN_VALUES.join(["", *texts])
        if not any(sign in together for sign in NEED_CARE):
            return texts
    if column.dtype == object:  # values of several kinds, of which 1 and True are equal
        return [
            "" if is_missing else _cell(value)
            for value, is_missing in zip(column, column.isna(), strict=True)
        ]
    written = {value: _cell(value) for value in column.dropna().unique().tolist()}
    return [written.get(value, "") for value in column.tolist()]


def _numbers(column: pd.Series[Any]) -> list[str]:
    numbers: list[Any] = column.tolist()  # of which JSON writes NaN as null
    if str(column.name).endswith("_bytes"):
        numbers = [None if math.isnan(number) else round(number) for number in numbers]
    return msgspec.json.encode(numbers).decode()[1:-1].replace("null", "").split(",")


def _cell(value: Any) -> str:
    """In quotes where it holds what CSV gives a meaning to (RFC 4180, section 2); no text is a formula."""
    text = f"'{value}" if isinstance(value, str) and value.startswith(FORMULA_STARTS) else str(value)
    return '"{}"'.format(text.replace('"', '""')) if re.search(r'[",\r\n]', text) else text
