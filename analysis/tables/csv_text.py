"""The summary for programs: every column as CSV, of 100,000 cells within a second or two."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any

import msgspec
import pandas as pd

FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")
BETWEEN_VALUES = "\x1f"
NEED_CARE = ('"', ",", "\r", "\n", *(f"{BETWEEN_VALUES}{start}" for start in FORMULA_STARTS))
"""What a column's texts, each after BETWEEN_VALUES, hold if any of them may not be written as it is."""
PIECE_ROWS = 4096
Writer = Callable[[slice], Sequence[str]]
"""What writes some rows of a column, or of neighbouring ones with commas between them."""


def csv_text(summary: pd.DataFrame) -> str:
    """All columns of the summary; missing is empty, and no text cell is a spreadsheet formula."""
    return "".join(csv_pieces(summary))


def csv_pieces(summary: pd.DataFrame) -> Iterator[str]:
    """The same text in pieces of whole lines: memory that is used again costs less time than new memory."""
    yield ",".join(map(_cell, summary.columns)) + "\n"
    written = [*_written(summary[name] for name in summary.columns)]
    for start in range(0, len(summary), PIECE_ROWS):
        rows = slice(start, min(start + PIECE_ROWS, len(summary)))
        lines = map(",".join, zip(*(write(rows) for write in written), strict=True))
        yield "\n".join([*lines, ""])


def _written(columns: Iterable[pd.Series[Any]]) -> Iterator[Writer]:
    """What writes each column; neighbours that are the same in every row are written as one."""
    for is_same, neighbours in groupby(columns, _is_same):
        if is_same:
            once = [write(slice(1)) for write in _varied(column.iloc[:1] for column in neighbours)]
            yield partial(_repeated, ",".join(chain.from_iterable(once)))
        else:
            yield from _varied(neighbours)


def _varied(columns: Iterable[pd.Series[Any]]) -> Iterator[Writer]:
    """What writes each column; neighbours that hold numbers as one, for millions of texts take long."""
    for is_number, neighbours in groupby(columns, _is_number):
        if is_number:
            yield partial(_numbers, [*neighbours])
        else:
            yield from (_texts(column).__getitem__ for column in neighbours)


def _repeated(text: str, rows: slice) -> list[str]:
    return [text] * len(range(rows.stop)[rows])


def _is_same(column: pd.Series[Any]) -> bool:
    """Whether all its cells are written the same way; not asked of values of several kinds: 1 equals True."""
    if column.empty or pd.isna(column.iloc[0]):
        return bool(column.isna().all())
    return column.dtype != object and bool(column.eq(column.iloc[0]).all())


def _is_number(column: pd.Series[Any]) -> bool:
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def _numbers(columns: Sequence[pd.Series[Any]], rows: slice) -> list[str]:
    """These rows of numbers: whole bytes, nothing where missing."""
    numbers = [*zip(*(_values(column.iloc[rows]) for column in columns), strict=True)]
    written = msgspec.json.encode(numbers).decode()  # NaN is null
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
