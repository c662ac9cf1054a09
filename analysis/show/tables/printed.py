"""The summary as a table to paste into a paper or a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pandas as pd

from analysis.cells.cells import Cells
from analysis.show.tables.rows import headings_of, main_headings, markdown_table, rows_of


def summary_table(cells: Cells, form: str) -> str:
    """The main columns of these cells in one of TABLE_FORMS, without those that are empty."""
    rows = [row.texts() for row in rows_of(cells)]
    frame = pd.DataFrame(rows, columns=headings_of(cells), dtype="str")[main_headings(cells)]
    return TABLE_FORMS[form](frame[[heading for heading in frame if any(frame[heading])]])


def _latex(frame: pd.DataFrame) -> str:
    """With booktabs' rules."""
    style = frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    return style.to_latex(hrules=True)


def _markdown(frame: pd.DataFrame) -> str:
    return markdown_table([*frame.columns], frame.to_numpy().tolist())


TABLE_FORMS: Mapping[str, Callable[[pd.DataFrame], str]] = {"latex": _latex, "markdown": _markdown}
