"""Figure of strong scaling: parallel efficiency against the number of ranks.

A line shows one strategy, length and kind of work, which is a group of comparable cells.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.comparison import BASE_STRATEGY, strategy_work_number, work_keys
from analysis.cells.series import Series, styles_of, variant
from analysis.labels import SHARED_CORES, count_label
from analysis.read.metrics import metric_text
from analysis.show.figures.drawn_series import line_points
from analysis.show.figures.failures import failure_marks, sheet_against
from analysis.show.figures.sheet import Heading, Sheet
from analysis.show.figures.style import PERCENT, RANKS, REFERENCE, plot_options, scale_y
from bench.common.labels import length_label

EFFICIENCY = "scaling_efficiency"
MAX_LINES = 12
"""Largest number of lines that can be distinguished; if there are more, the longest lengths are drawn."""
BASES = "Base, 100 %: local if it did the same work, else the fewest ranks of the same strategy"


def scaling_sheet(cells: Cells, heading: Heading) -> Sheet:
    """Return the figure of tokens/s per rank over tokens/s per rank of the base cell; 1 is ideal."""
    shown, remarks = scaling_cells(cells)
    series = [*scaling_series(shown.frame)]
    marks, ranks = failure_marks(series, RANKS), RANKS.values(shown.frame)
    sheet = sheet_against(RANKS, ranks, heading, marks, "parallel efficiency")
    sheet.axes.axhline(1, linestyle="--", label="ideal: 100 %", **REFERENCE)
    for line in line_points(series, EFFICIENCY, RANKS.column):
        points = fastest_per_ranks(line.rows)
        places, options = line.x[points.index], plot_options(line.series.style, line.series.variant_number)
        sheet.axes.plot(places, points[EFFICIENCY], label=line.series.label, **options)
        for place, cell in zip(places, shown.rows_of(points), strict=True):
            if pd.notna(cell[EFFICIENCY]):
                count = count_label(int(cell[RANKS.column]), "rank")
                base = f"{cell['scaling_base_strategy']} on {int(cell['scaling_base_ranks'])}"
                efficiency = metric_text(cell, EFFICIENCY)
                text = f"{line.series.label}, {count}: {efficiency} of the rate per rank of {base}"
                sheet.add_hover_point(place, cell[EFFICIENCY], text)
    scale_y(sheet.axes, pd.concat([shown.frame[EFFICIENCY], pd.Series([1.0])]))
    sheet.axes.yaxis.set_major_formatter(PERCENT)
    sheet.remarks.extend(remarks)
    return sheet


def scaling_cells(cells: Cells) -> tuple[Cells, list[str]]:
    """Return the cells whose strategy has results on several numbers of ranks, and remarks for the caption.

    If there are more than MAX_LINES lines, only the longest lengths are returned.
    """
    group = strategy_work_number(cells.frame, cells.work)
    shown = cells.select(cells.frame[EFFICIENCY].notna().groupby(group).transform("any"))
    seq_len = shown.frame["seq_len"]
    lines = group[shown.frame.index].groupby(seq_len).nunique().sort_index(ascending=False)
    left_out = lines.index[1:][lines.cumsum()[1:] > MAX_LINES]
    remarks = [BASES, *([SHARED_CORES] if cells.is_cpu else [])]
    if len(left_out):
        remarks.append(f"Left out: {count_label(len(left_out), 'other length')} (in summary.csv)")
    return shown.select(~seq_len.isin(left_out)), remarks


def scaling_series(cells: pd.DataFrame) -> Iterator[Series]:
    """Yield a series for every strategy, length and kind of work.

    Series of one length and kind of work have markers with the same fill.
    """
    keys = _distinguishing_work_keys(cells)
    kinds = cells.groupby(["seq_len", *keys], dropna=False, sort=True).ngroup()
    styles = styles_of(cells["strategy"].unique())
    for strategy in sorted(styles, key=lambda name: (name != BASE_STRATEGY, name)):
        of_strategy = cells[cells["strategy"] == strategy]
        for number, rows in of_strategy.groupby(kinds, sort=True):
            first = rows.iloc[0]
            parts = [length_label(int(first["seq_len"])), variant(first, keys)]
            yield Series(strategy, styles[strategy], ", ".join(filter(None, parts)), int(number), rows)


def _distinguishing_work_keys(cells: pd.DataFrame) -> list[str]:
    """Return the settings, besides the length, that are needed to distinguish the kinds of work of cells."""
    keys: list[str] = []
    count = cells["seq_len"].nunique()
    for key in work_keys(cells):
        refined = cells.groupby(["seq_len", *keys, key], dropna=False).ngroups
        if key != "seq_len" and refined > count:
            keys.append(key)
            count = refined
    return keys


def fastest_per_ranks(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the fastest cell for every number of ranks, or a failed cell, which is drawn as a gap."""
    best = rows.sort_values([RANKS.column, EFFICIENCY], ascending=[True, False], na_position="last")
    return best.drop_duplicates(RANKS.column)
