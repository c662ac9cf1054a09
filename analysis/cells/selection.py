"""What of many cells a figure or a page shows, chosen by one rule, with a sentence about the rest."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.cells.cells import Cells
from analysis.labels import count_label

MAX_SERIES = 24
"""More series than this cannot be told apart in a figure."""
MAX_SHOWN_CELLS = 1000
ALL_IN = "all cells are in summary.csv"


@dataclass(frozen=True, slots=True)
class Selection:
    """Some of many cells."""

    cells: Cells
    note: str | None
    """What was left out; None where nothing was."""


def for_figures(cells: Cells) -> Selection:
    """Return all cells of at most MAX_SERIES series, else those of the series with most results.

    Of equal series the first in the order of the cells is drawn.
    """
    series = cells.series_number
    total = series.nunique()
    if total <= MAX_SERIES:
        return Selection(cells, None)
    results = cells.frame["tokens_per_s"].notna().groupby(series, sort=False).sum()
    chosen = results.sort_values(ascending=False, kind="stable").index[:MAX_SERIES]
    note = f"The {MAX_SERIES} of {total:,} series with most results are drawn; {ALL_IN}."
    return Selection(cells.part(series.isin(chosen)), note)


def for_pages(cells: Cells) -> Selection:
    """The MAX_SHOWN_CELLS cells that were started last."""
    if len(cells) <= MAX_SHOWN_CELLS:
        return Selection(cells, None)
    in_time = cells.frame["started_at"].sort_values(kind="stable", na_position="first")
    newest = in_time.index[-MAX_SHOWN_CELLS:]
    note = (
        f"Of {count_label(len(cells), 'cell')} the {MAX_SHOWN_CELLS:,} that were started last are listed;"
        f" {ALL_IN}."
    )
    return Selection(cells.part(newest.sort_values()), note)
