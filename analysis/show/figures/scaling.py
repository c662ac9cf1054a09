"""Strong scaling as a figure: tokens/s per rank over the base's, against the number of ranks.

A line stands for one strategy, length and kind of work.
"""

from __future__ import annotations

from collections.abc import Iterator

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.comparison import BASE, within_strategy, work_keys
from analysis.cells.series import Series, styles_of, variant
from analysis.labels import SHARED_CORES, count_label
from analysis.read.metrics import text_of
from analysis.show.figures.drawn_series import placed
from analysis.show.figures.failures import failure_marks, sheet_against
from analysis.show.figures.sheet import Heading, Sheet
from analysis.show.figures.style import PERCENT, RANKS, REFERENCE, look_of, scale_y
from bench.common.labels import length_label

EFFICIENCY = "scaling_efficiency"
MAX_LINES = 12
"""More lines than these cannot be told apart: then only the longest lengths are drawn."""
BASES = "100 %: local where it did the same work, else the strategy's own fewest ranks"


def scaling_sheet(cells: Cells, heading: Heading) -> Sheet:
    """Tokens per second and rank over those of the base, of which 1 is ideal."""
    shown, remarks = scaling_cells(cells)
    series = [*scaling_series(shown.frame)]
    marks, ranks = failure_marks(series, RANKS), RANKS.values(shown.frame)
    sheet = sheet_against(RANKS, ranks, heading, marks, "tokens/s per rank, of the base's")
    sheet.axes.axhline(1, linestyle="--", label="ideal: 100 %", **REFERENCE)
    for each, rows, x in placed(series, EFFICIENCY, RANKS.column):
        points, look = fastest_per_ranks(rows), look_of(each.style, each.variant_number)
        places = x[points.index]
        sheet.axes.plot(places, points[EFFICIENCY], label=each.label, **look)
        for place, cell in zip(places, shown.rows_of(points), strict=True):
            if pd.notna(cell[EFFICIENCY]):
                count = count_label(int(cell[RANKS.column]), "rank")
                base = f"{cell['scaling_base_strategy']} on {int(cell['scaling_base_ranks'])}"
                text = f"{each.label}, {count}: {text_of(cell, EFFICIENCY)} per rank of {base}"
                sheet.point(place, cell[EFFICIENCY], text)
    scale_y(sheet.axes, pd.concat([shown.frame[EFFICIENCY], pd.Series([1.0])]))
    sheet.axes.yaxis.set_major_formatter(PERCENT)
    sheet.remarks.extend(remarks)
    return sheet


def scaling_cells(cells: Cells) -> tuple[Cells, list[str]]:
    """The cells whose strategy has results on several numbers of ranks, and what a reader must know of them.

    Of too many lines those of the longest lengths.
    """
    group = within_strategy(cells.frame, cells.work)
    shown = cells.part(cells.frame[EFFICIENCY].notna().groupby(group).transform("any"))
    seq_len = shown.frame["seq_len"]
    lines = group[shown.frame.index].groupby(seq_len).nunique().sort_index(ascending=False)
    left_out = lines.index[1:][lines.cumsum()[1:] > MAX_LINES]
    remarks = [BASES, *([SHARED_CORES] if cells.is_cpu else [])]
    if len(left_out):
        remarks.append(f"{count_label(len(left_out), 'other length')} in summary.csv")
    return shown.part(~seq_len.isin(left_out)), remarks


def scaling_series(cells: pd.DataFrame) -> Iterator[Series]:
    """A line for each strategy, length and kind of work; lines of one length have one filling."""
    keys = _work_in_words(cells)
    kinds = cells.groupby(["seq_len", *keys], dropna=False, sort=True).ngroup()
    styles = styles_of(cells["strategy"].unique())
    for strategy in sorted(styles, key=lambda name: (name != BASE, name)):
        own = cells[cells["strategy"] == strategy]
        for number, rows in own.groupby(kinds, sort=True):
            first = rows.iloc[0]
            what = [length_label(int(first["seq_len"])), variant(first, keys)]
            yield Series(strategy, styles[strategy], ", ".join(filter(None, what)), int(number), rows)


def _work_in_words(cells: pd.DataFrame) -> list[str]:
    """The keys of work, beside the length, that it takes to tell these cells' work apart."""
    keys: list[str] = []
    count = cells["seq_len"].nunique()
    for key in work_keys(cells):
        refined = cells.groupby(["seq_len", *keys, key], dropna=False).ngroups
        if key != "seq_len" and refined > count:
            keys.append(key)
            count = refined
    return keys


def fastest_per_ranks(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the cells on each number of ranks the fastest; a number without a result stays in, as a gap."""
    best = rows.sort_values([RANKS.column, EFFICIENCY], ascending=[True, False], na_position="last")
    return best.drop_duplicates(RANKS.column)
