"""The summary for programs: every column as CSV."""

from __future__ import annotations

from typing import Any

import pandas as pd

FORMULA_STARTS = ("=", "+", "-", "@", "\t")


def csv_text(summary: pd.DataFrame) -> str:
    """All columns of the summary; missing is empty, and no text cell is a spreadsheet formula."""
    written = {name: _writable(column) for name, column in summary.items()}
    return pd.DataFrame(written, columns=summary.columns).to_csv(index=False, lineterminator="\n")


def _writable(column: pd.Series[Any]) -> pd.Series[Any]:
    """The column with whole bytes and harmless texts."""
    if pd.api.types.is_bool_dtype(column):
        return column
    if pd.api.types.is_numeric_dtype(column):
        return column.round().astype("Int64") if str(column.name).endswith("_bytes") else column
    return column.map(_harmless)


def _harmless(value: Any) -> Any:
    """A text without what a spreadsheet computes, and with line ends that CSV readers agree on."""
    if not isinstance(value, str):
        return value
    text = value.replace("\r\n", "\n").replace("\r", "\n")
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text
