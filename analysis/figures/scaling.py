"""Strong scaling as a figure: tokens/s per rank over the base's, against the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from analysis.cells.cells import Cells
from analysis.cells.comparison import BASE, within_strategy, work_keys
from analysis.cells.series import Series, styles_of, variant
from analysis.figures.axes import finish_axes, scale_y, write_remarks
from analysis.figures.failures import Mark, failure_marks
from analysis.figures.quantity import Area
from analysis.figures.style import LENGTH, MUTED_COLOR, RANKS, dodge, line_of
from analysis.labels import SHARED_CORES, count_label
from analysis.metrics.definitions import text_of
from bench.labels import length_label

EFFICIENCY = "scaling_efficiency"
NOUN = "scaling efficiency"
MAX_LINES = 12
"""More lines than these cannot be told apart: then only some lengths are drawn."""
IDEAL_LABEL = "ideal: 100 %"
MANY_BASES = "local where it did the same work, else the strategy's own fewest ranks; named in summary.csv"
MAX_BASES = 3
OWN = "the strategy's own"


@dataclass(frozen=True, eq=False, slots=True)
class Lines:
    """What the figure shows."""

    cells: Cells
    series: Sequence[Series]
    marks: Sequence[Mark]
    remarks: Sequence[str]
    """What a reader must know of the cells."""

    @classmethod
    def of(cls, cells: Cells) -> Self:
        shown, remarks = scaling_cells(cells)
        series = [*_series(shown.frame)]
        return cls(shown, series, failure_marks(series, RANKS), remarks)

    def placed(self) -> Iterator[tuple[Series, pd.DataFrame, pd.Series[float]]]:
        """Each line that has a point, its cells by ranks, and where on the x axis they stand."""
        drawn = [each for each in self.series if each.rows[EFFICIENCY].notna().any()]
        ranks = RANKS.values(self.cells.frame)
        for number, each in enumerate(drawn):
            points = _fastest_per_ranks(each.rows)
            yield each, points, points[RANKS.column] * dodge(number, len(drawn), ranks)


def plot_scaling(cells: Cells, axes: Axes) -> None:
    """Tokens per second and rank over those of the base, of which 1 is ideal."""
    lines = _lines(cells)
    drawn = [*lines.placed()]
    if drawn:
        axes.axhline(1, color=MUTED_COLOR, linestyle="--", linewidth=1.1, label=IDEAL_LABEL, zorder=1.5)
    for each, points, x in drawn:
        style = each.style
        axes.plot(
            x, points[EFFICIENCY], color=style.color, marker=style.marker, markersize=6, linewidth=1.4,
            alpha=0.9, label=each.label, **line_of(each.variant_number),
        )  # fmt: skip
    scale_y(axes, pd.concat([lines.cells.frame[EFFICIENCY], pd.Series([1.0])]))
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    write_remarks(axes, [*_bases([each for each, _, _ in drawn]), *lines.remarks])
    finish_axes(axes, lines.cells, lines.marks, column=EFFICIENCY, noun=NOUN, scale=RANKS)


def scaling_areas(cells: Cells) -> Iterator[Area]:
    """What can be pointed at: every point, with its ranks."""
    lines = _lines(cells)
    for each, points, places in lines.placed():
        for x, cell in zip(places, lines.cells.rows_of(points), strict=True):
            value = float(cell[EFFICIENCY])
            if pd.notna(value):
                ranks = count_label(int(cell[RANKS.column]), "rank")
                text = f"{each.label}, {ranks}: {text_of(cell, EFFICIENCY)} of the base's per rank"
                yield Area((x, x), (value, value), text)


def scaling_marks(cells: Cells) -> Sequence[Mark]:
    """The failures that the figure shows."""
    return _lines(cells).marks


@lru_cache(maxsize=1)  # both widths of the figure ask for the same, and what can be pointed at
def _lines(cells: Cells) -> Lines:
    return Lines.of(cells)


def scaling_cells(cells: Cells) -> tuple[Cells, list[str]]:
    """The cells whose strategy has results on several numbers of ranks, and what a reader must know of them.

    All cells where there are none; only some lengths where all would be too many lines.
    """
    group = within_strategy(cells.frame, cells.work)
    scales = cells.frame[EFFICIENCY].notna().groupby(group).transform("any")
    shown = cells.part(scales) if scales.any() else cells
    lengths = LENGTH.values(shown.frame)
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


def _series(cells: pd.DataFrame) -> Iterator[Series]:
    """A line for each strategy, length and kind of work; lines of one length have one style."""
    keys = _work_in_words(cells)
    kinds = cells.groupby(["seq_len", *keys], dropna=False, sort=True).ngroup() if len(cells) else None
    styles = styles_of(cells["strategy"].unique())
    for strategy in sorted(cells["strategy"].unique(), key=lambda name: (name != "local", name)):
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


def _fastest_per_ranks(rows: pd.DataFrame) -> pd.DataFrame:
    """Of the cells on each number of ranks the fastest; a number without a result stays in, as a gap."""
    best = rows.sort_values([RANKS.column, EFFICIENCY], ascending=[True, False], na_position="last")
    return best.drop_duplicates(RANKS.column)


def _bases(drawn: Sequence[Series]) -> list[str]:
    """`100 %: local on 1 rank, or the strategy's own on 4 ranks`."""
    if not drawn:
        return []
    columns = ["scaling_base_strategy", "scaling_base_ranks"]
    found = pd.concat([each.rows[columns] for each in drawn]).dropna()
    bases = sorted({(name != BASE, int(ranks)) for name, ranks in found.itertuples(index=False)})
    names = [f"{OWN if is_own else BASE} on {count_label(ranks, 'rank')}" for is_own, ranks in bases]
    return [f"100 %: {', or '.join(names) if len(names) <= MAX_BASES else MANY_BASES}"]
