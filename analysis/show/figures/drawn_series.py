"""A column of the frame against length: a line for each series, which says its values when pointed at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.series import Series
from analysis.cells.statuses import shown_status
from analysis.labels import n_label, status_label
from analysis.read.metrics import text_of
from analysis.show.figures.sheet import Sheet
from analysis.show.figures.style import MUTED_COLOR, dodge, look_of
from bench.common.labels import length_label
from bench.record.record import Provenance

BAND = "band of the model"
BRACKET = "with all and none of the link's time exposed"
HOLLOW: Mapping[str, Any] = {"fillstyle": "none", "capsize": 0, "elinewidth": 5, "alpha": 0.7}
"""The drawing of a replayed series: hollow marks, and a wide bar for its range."""
BESIDE: Mapping[str, Any] = {
    "marker": "_", "markersize": 12, "markeredgewidth": 2.5, "linestyle": (0, (1, 2)), "linewidth": 1.0,
    "zorder": 1.8,
}  # fmt: skip
"""A flat mark behind the points: no filling tells it apart from them, as that is a variant's."""


@dataclass(frozen=True, slots=True)
class DrawnColumn:
    """A column to draw, with the columns of its interval where it has one."""

    column: str
    low: str | None = None
    high: str | None = None
    range_noun: str = "range"
    """What lies between these two."""
    band: str | None = None
    """Of predicted cells the columns of the band, with {} where the end is named."""
    with_link: str | None = None
    """The column of a replayed cell's value with all of the link's time exposed."""
    unit: str = ""
    """After the value, where its column does not say it."""
    samples: Callable[[Mapping[Any, Any]], str] = lambda cell: f"n={n_label(cell)}" if n_label(cell) else ""
    """How many a cell's value is of."""


def placed(
    series: Sequence[Series], column: str, x_column: str = "seq_len"
) -> Iterator[tuple[Series, pd.DataFrame, pd.Series[float]]]:
    """Each series that has a value in this column, its cells in order, and where on the x axis they stand.

    Cells without a value stay in, as gaps: a line must not run across a failure.
    """
    drawn = [each for each in series if each.rows[column].notna().any()]
    places = sorted({int(place) for each in drawn for place in each.rows[x_column]})
    for number, each in enumerate(drawn):
        rows = each.rows.sort_values(x_column)
        yield each, rows, rows[x_column] * dodge(number, len(drawn), places)


def draw_series(sheet: Sheet, cells: Cells, quantity: DrawnColumn) -> None:
    """A line with error bars for each series."""
    for each, rows, x in placed(cells.series, quantity.column):
        look = {"capsize": 3, **look_of(each.style, each.variant_number)}
        if rows["provenance"].eq(Provenance.REPLAYED).all():
            look |= HOLLOW
        bars = _error_bars(rows, quantity)
        sheet.axes.errorbar(x, rows[quantity.column], yerr=bars, label=each.label, **look)
        _say(sheet, cells, each, rows, x, quantity)


def draw_beside(sheet: Sheet, cells: Cells, quantity: DrawnColumn, label: str) -> None:
    """Draw a second quantity at each point of the series; the legend has one entry for all."""
    drawn = [*placed(cells.series, quantity.column)]
    for each, rows, x in drawn:
        sheet.axes.plot(x, rows[quantity.column], color=each.style.color, alpha=0.6, **BESIDE)
        _say(sheet, cells, each, rows, x, quantity)
    if drawn:
        # A container as the series are: a line would stand before them in the legend.
        sheet.axes.errorbar([], [], color=MUTED_COLOR, label=label, **BESIDE)


def _say(
    sheet: Sheet, cells: Cells, each: Series, rows: pd.DataFrame, x: pd.Series[float], quantity: DrawnColumn
) -> None:
    for place, cell in zip(x, cells.rows_of(rows), strict=True):
        value = float(cell[quantity.column])
        if pd.notna(value):
            sheet.point(place, value, point_text(each.label, cell, quantity))


def point_text(name: str, cell: Mapping[Any, Any], quantity: DrawnColumn) -> str:
    """`ulysses, 8k: 81,920 tokens/s, 95 % interval 80,100 to 83,000, n=12, ok`."""
    value = " ".join(filter(None, [text_of(cell, quantity.column), quantity.unit]))
    parts = [value, _range(cell, quantity), quantity.samples(cell), status_label(shown_status(cell))]
    return f"{name}, {length_label(int(cell['seq_len']))}: {', '.join(filter(None, parts))}"


def _range(cell: Mapping[Any, Any], quantity: DrawnColumn) -> str:
    noun, low, high = quantity.range_noun, quantity.low, quantity.high
    if quantity.band is not None and cell["provenance"] == Provenance.PREDICTED:
        noun, low, high = BAND, quantity.band.format("_low"), quantity.band.format("_high")
    if quantity.with_link is not None and cell["provenance"] == Provenance.REPLAYED:
        noun, low, high = BRACKET, quantity.with_link, quantity.column
    if low is None or high is None or pd.isna(cell[low]) or pd.isna(cell[high]):
        return ""
    return f"{noun} {text_of(cell, low)} to {text_of(cell, high)}"


def _error_bars(rows: pd.DataFrame, quantity: DrawnColumn) -> list[pd.Series[float]] | None:
    """Distances from the value down and up; NaN where a cell has no interval, band or bracket."""
    value = rows[quantity.column]
    low, high = (rows[end] if end else value * np.nan for end in (quantity.low, quantity.high))
    if quantity.band is not None:
        predicted = rows["provenance"].eq(Provenance.PREDICTED)
        low = low.where(~predicted, rows[quantity.band.format("_low")])
        high = high.where(~predicted, rows[quantity.band.format("_high")])
    if quantity.with_link is not None:
        replayed = rows["provenance"].eq(Provenance.REPLAYED)
        low, high = low.where(~replayed, rows[quantity.with_link]), high.where(~replayed, value)
    down, up = value - low, high - value
    return None if down.isna().all() else [down.clip(lower=0), up.clip(lower=0)]
