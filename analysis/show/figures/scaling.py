"""Strong scaling as a figure: tokens/s per rank over the base's, against the number of ranks.

A line stands for one strategy, length and kind of work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
"""More lines than these cannot be told apart: then only some lengths are drawn."""
MANY_BASES = "local where it did the same work, else the strategy's own fewest ranks; named in summary.csv"
MAX_BASES = 3
OWN = "the strategy's own"


def scaling_sheet(cells: Cells, heading: Heading) -> Sheet:
    """Tokens per second and rank over those of the base, of which 1 is ideal."""
    shown, remarks = scaling_cells(cells)
    series = [*scaling_series(shown.frame)]
    drawn = [*placed(series, EFFICIENCY, RANKS.column)]
    marks, ranks = failure_marks(series, RANKS), RANKS.values(shown.frame)
    sheet = sheet_against(RANKS, ranks, heading, marks, "tokens/s per rank, of the base's")
    sheet.axes.axhline(1, linestyle="--", label="ideal: 100 %", **REFERENCE)
    for each, rows, x in drawn:
        points, look = fastest_per_ranks(rows), look_of(each.style, each.variant_number)
        places = x[points.index]
        sheet.axes.plot(places, points[EFFICIENCY], label=each.label, **look)
        for place, cell in zip(places, shown.rows_of(points), strict=True):
            if pd.notna(cell[EFFICIENCY]):
                count = count_label(int(cell[RANKS.column]), "rank")
                text = f"{each.label}, {count}: {text_of(cell, EFFICIENCY)} of the base's per rank"
                sheet.point(place, cell[EFFICIENCY], text)
    scale_y(sheet.axes, pd.concat([shown.frame[EFFICIENCY], pd.Series([1.0])]))
    sheet.axes.yaxis.set_major_formatter(PERCENT)
    sheet.remarks.extend([*scaling_bases([each for each, _, _ in drawn]), *remarks])
    return sheet


def scaling_cells(cells: Cells) -> tuple[Cells, list[str]]:
    """The cells whose strategy has results on several numbers of ranks, and what a reader must know of them.

    Only some lengths where all would be too many lines.
    """
    group = within_strategy(cells.frame, cells.work)
    shown = cells.part(cells.frame[EFFICIENCY].notna().groupby(group).transform("any"))
    lengths = sorted(map(int, shown.frame["seq_len"].unique()))
    few = _few_enough(lengths, group[shown.frame.index].groupby(shown.frame["seq_len"]).nunique())
    remarks = [SHARED_CORES] if cells.is_cpu else []
    if len(few) < len(lengths):
        left_out = count_label(len(lengths) - len(few), "other length")
        remarks.append(f"{left_out} in summary.csv")
    return shown.part(shown.frame["seq_len"].isin(few)), remarks


def _few_enough(lengths: Sequence[int], lines: pd.Series[int]) -> Sequence[int]:
    """All lengths, or shortest, middle and longest, or fewer: the first choice without too many lines."""
    ends = [*lengths[:1], *lengths[len(lengths) // 2 : len(lengths) // 2 + 1], *lengths[-1:]]
    for choice in (lengths, ends, ends[::2]):
        if lines[[*choice]].sum() <= MAX_LINES:
            return choice
    return lengths[-1:]


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


def scaling_bases(drawn: Sequence[Series]) -> list[str]:
    """`100 %: local on 1 rank, or the strategy's own on 4 ranks`."""
    columns = ["scaling_base_strategy", "scaling_base_ranks"]
    found = pd.concat([each.rows[columns] for each in drawn]).dropna()
    bases = sorted({(name != BASE, int(ranks)) for name, ranks in found.itertuples(index=False)})
    names = [f"{OWN if is_own else BASE} on {count_label(ranks, 'rank')}" for is_own, ranks in bases]
    return [f"100 %: {', or '.join(names) if len(names) <= MAX_BASES else MANY_BASES}"]
