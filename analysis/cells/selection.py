"""What of many cells a figure or a page shows, chosen by one rule, with a sentence about the rest."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.comparison import RANKS, work_number
from analysis.labels import count_label

MAX_SERIES = 24
"""A figure can show as many, if need be."""
CHOSEN_SERIES = 12
"""Where a figure cannot show all, it shows as many as are easily told apart."""
MAX_SHOWN_CELLS = 1000
ALL_IN = "all cells are in summary.csv"


@dataclass(frozen=True, slots=True)
class Selection:
    """Some of many cells."""

    cells: Cells
    note: str | None
    """What was left out; None where nothing was."""


def for_figures(cells: Cells) -> Selection:
    """All cells of at most MAX_SERIES series, else those of CHOSEN_SERIES at the most.

    Whole comparisons where they fit, those of most strategies with a result first: series of different
    comparisons did different work, so the fastest of them all would say nothing.
    """
    series = cells.series_number
    total = series.nunique()
    if total <= MAX_SERIES:
        return Selection(cells, None)
    chosen = _fullest_comparisons(cells.frame, series)
    is_shown = series.isin(chosen)
    by_strategy = series[~is_shown].groupby(cells.frame["strategy"][~is_shown]).nunique()
    counts = ", ".join(f"{strategy} {count:,}" for strategy, count in by_strategy.items())
    note = (
        f"{len(chosen)} of {total:,} series are drawn, of comparisons in which most strategies have a result."
        f" Left out: {counts}; {ALL_IN}"
    )
    return Selection(cells.part(is_shown), note)


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


def _fullest_comparisons(summary: pd.DataFrame, series: pd.Series[int]) -> set[int]:
    """Series by number; where one comparison alone has too many, its fullest series of each strategy."""
    comparison = work_number(summary, but=("seq_len",))
    timed = summary["tokens_per_s"].notna()
    ranks = pd.DataFrame(
        {
            "strategies": summary["strategy"][timed].groupby(comparison[timed]).nunique(),
            "cells": timed.groupby(comparison).sum(),
            "series": series.groupby(comparison).nunique(),
        }
    ).fillna(0)
    ranks = ranks.sort_values(["strategies", "cells"], ascending=False, kind="stable")
    fits = ranks["series"].cumsum() <= CHOSEN_SERIES
    if not fits.iloc[0]:
        return _fullest_series(summary, series, comparison == ranks.index[0])
    together = ranks.index[fits.cumprod().astype(bool)]
    return {*series[comparison.isin(together)]}


def _fullest_series(summary: pd.DataFrame, series: pd.Series[int], among: pd.Series[bool]) -> set[int]:
    """CHOSEN_SERIES of one comparison: of each strategy in turn the one with most results, then the fastest.

    A strategy's next is one on another number of ranks, while there is any: only such show how it scales.
    """
    of_series = summary[among].groupby(series[among])
    each = pd.DataFrame(
        {
            "strategy": of_series["strategy"].first(),
            "ranks": of_series[RANKS].first(),
            "cells": of_series["tokens_per_s"].count(),
            "tokens_per_s": of_series["tokens_per_s"].max(),
        }
    ).sort_values(["cells", "tokens_per_s"], ascending=False, kind="stable")
    each["again"] = each.groupby(["strategy", "ranks"], dropna=False).cumcount()
    each["turn"] = each.groupby(["strategy", "again"]).cumcount()
    return {*each.sort_values(["again", "turn"], kind="stable").index[:CHOSEN_SERIES]}
