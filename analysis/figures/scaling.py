"""Strong scaling as a figure: tokens/s per rank over the base's, against the number of ranks."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.comparison import BASE
from analysis.cells.scaling import EFFICIENCY, fastest_per_ranks, scaling_cells, scaling_series
from analysis.cells.series import Series
from analysis.figures.failures import failure_marks, sheet_against
from analysis.figures.quantity import placed
from analysis.figures.sheet import Heading, Sheet
from analysis.figures.style import PERCENT, RANKS, REFERENCE, look_of, scale_y
from analysis.labels import count_label
from analysis.metrics.definitions import text_of

IDEAL_LABEL = "ideal: 100 %"
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
    sheet.axes.axhline(1, linestyle="--", label=IDEAL_LABEL, **REFERENCE)
    for each, rows, x in drawn:
        points = fastest_per_ranks(rows)
        places = x[points.index]
        sheet.axes.plot(
            places, points[EFFICIENCY], label=each.label, **look_of(each.style, each.variant_number)
        )
        for place, cell in zip(places, shown.rows_of(points), strict=True):
            if pd.notna(cell[EFFICIENCY]):
                count = count_label(int(cell[RANKS.column]), "rank")
                text = f"{each.label}, {count}: {text_of(cell, EFFICIENCY)} of the base's per rank"
                sheet.point(place, cell[EFFICIENCY], text)
    scale_y(sheet.axes, pd.concat([shown.frame[EFFICIENCY], pd.Series([1.0])]))
    sheet.axes.yaxis.set_major_formatter(PERCENT)
    sheet.remarks.extend([*_bases([each for each, _, _ in drawn]), *remarks])
    return sheet


def _bases(drawn: Sequence[Series]) -> list[str]:
    """`100 %: local on 1 rank, or the strategy's own on 4 ranks`."""
    columns = ["scaling_base_strategy", "scaling_base_ranks"]
    found = pd.concat([each.rows[columns] for each in drawn]).dropna()
    bases = sorted({(name != BASE, int(ranks)) for name, ranks in found.itertuples(index=False)})
    names = [f"{OWN if is_own else BASE} on {count_label(ranks, 'rank')}" for is_own, ranks in bases]
    return [f"100 %: {', or '.join(names) if len(names) <= MAX_BASES else MANY_BASES}"]
