"""Selects the cells that figures and pages show where there are too many, and says what is left out."""

from __future__ import annotations

from dataclasses import dataclass

from analysis.cells.cells import Cells

MAX_SERIES = 24
"""Largest number of series that a reader can distinguish in a figure."""
MAX_SHOWN_CELLS = 1000
ALL_IN_CSV = "all cells are in summary.csv"


@dataclass(frozen=True, slots=True)
class Selection:
    """Cells that are shown, with a sentence on the others."""

    cells: Cells
    note: str | None
    """Sentence on the cells that are left out; None where all are shown."""


def select_for_figures(cells: Cells) -> Selection:
    """Return all cells, or those of the MAX_SERIES series with the most results.

    Among series with equally many results, those that come first among the cells are drawn.
    """
    series = cells.series_number
    total = series.nunique()
    if total <= MAX_SERIES:
        return Selection(cells, None)
    results = cells.frame["tokens_per_s"].notna().groupby(series, sort=False).sum()
    chosen = results.sort_values(ascending=False, kind="stable").index[:MAX_SERIES]
    note = f"Figures show the {MAX_SERIES} of {total:,} series with the most results; {ALL_IN_CSV}."
    return Selection(cells.select(series.isin(chosen)), note)


def select_for_pages(cells: Cells) -> Selection:
    """Return all cells, or in unchanged order the MAX_SHOWN_CELLS that were started last."""
    if len(cells) <= MAX_SHOWN_CELLS:
        return Selection(cells, None)
    in_time = cells.frame["started_at"].sort_values(kind="stable", na_position="first")
    newest = in_time.index[-MAX_SHOWN_CELLS:]
    note = f"Only the last {MAX_SHOWN_CELLS:,} of {len(cells):,} started cells are listed; {ALL_IN_CSV}."
    return Selection(cells.select(newest.sort_values()), note)
