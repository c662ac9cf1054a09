"""Strong scaling as a figure: tokens/s per rank over the base's, against the number of ranks."""

from __future__ import annotations

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.scaling import EFFICIENCY, fastest_per_ranks, scaling_bases, scaling_cells, scaling_series
from analysis.labels import count_label
from analysis.read.definitions import text_of
from analysis.show.figures.failures import failure_marks, sheet_against
from analysis.show.figures.quantity import placed
from analysis.show.figures.sheet import Heading, Sheet
from analysis.show.figures.style import PERCENT, RANKS, REFERENCE, look_of, scale_y


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
