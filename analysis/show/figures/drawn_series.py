"""Functions that draw a column of the frame against length, with a line for each series."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.series import Series
from analysis.cells.statuses import shown_status
from analysis.labels import samples_label, status_label
from analysis.read.metrics import metric_text
from analysis.show.figures.sheet import Sheet
from analysis.show.figures.style import MUTED_COLOR, dodge, plot_options
from bench.common.labels import length_label
from bench.record.record import Provenance

BAND = "band of the model"
LINK_RANGE = "with all and none of the link's time exposed"
REPLAYED_OPTIONS: Mapping[str, Any] = {"fillstyle": "none", "capsize": 0, "elinewidth": 5, "alpha": 0.7}
"""Style of a replayed series: hollow markers, and a wide bar for the range."""
FLAT_MARKS: Mapping[str, Any] = {
    "marker": "_", "markersize": 12, "markeredgewidth": 2.5, "linestyle": (0, (1, 2)), "linewidth": 1.0,
    "zorder": 1.8,
}  # fmt: skip
"""Style of the marks of a second column. Fills cannot mark it, because they distinguish variants."""


@dataclass(frozen=True, slots=True)
class DrawnColumn:
    """A column to draw, and the columns of its interval, band or range."""

    column: str
    low: str | None = None
    high: str | None = None
    range_noun: str = "range"
    """Name of the range between `low` and `high`."""
    band: str | None = None
    """Columns of the band of predicted cells, with {} in place of `_low` and `_high`."""
    with_link: str | None = None
    """Column of a replayed cell's value with all of the link's time exposed."""
    unit: str = ""
    """Unit after the value, if the text of the column has none."""
    samples: Callable[[Mapping[Any, Any]], str] = lambda cell: (
        f"n={samples_label(cell)}" if samples_label(cell) else ""
    )
    """Function that returns the number of samples of a cell as text."""


@dataclass(frozen=True, slots=True)
class LinePoints:
    """The points of one series: its rows, sorted by the x axis, and their places on it."""

    series: Series
    rows: pd.DataFrame
    x: pd.Series[float]


def line_points(all_series: Sequence[Series], column: str, x_column: str = "seq_len") -> Iterator[LinePoints]:
    """Yield the points of every series that has a value in this column.

    Cells without a value stay as gaps, because a line must not run across a failure.
    """
    drawn = [series for series in all_series if series.rows[column].notna().any()]
    values = sorted({int(value) for series in drawn for value in series.rows[x_column]})
    for number, series in enumerate(drawn):
        rows = series.rows.sort_values(x_column)
        yield LinePoints(series, rows, rows[x_column] * dodge(number, len(drawn), values))


def draw_series(sheet: Sheet, cells: Cells, drawn: DrawnColumn) -> None:
    """Draw a column as a line with error bars for each series."""
    for line in line_points(cells.series, drawn.column):
        options = {"capsize": 3, **plot_options(line.series.style, line.series.variant_number)}
        if line.rows["provenance"].eq(Provenance.REPLAYED).all():
            options |= REPLAYED_OPTIONS
        bars = _error_bars(line.rows, drawn)
        sheet.axes.errorbar(line.x, line.rows[drawn.column], yerr=bars, label=line.series.label, **options)
        _add_hover_points(sheet, cells, line, drawn)


def draw_flat_marks(sheet: Sheet, cells: Cells, drawn: DrawnColumn, label: str) -> None:
    """Draw a second column as flat marks in the series' colours, with one entry in the legend."""
    lines = [*line_points(cells.series, drawn.column)]
    for line in lines:
        color = line.series.style.color
        sheet.axes.plot(line.x, line.rows[drawn.column], color=color, alpha=0.6, **FLAT_MARKS)
        _add_hover_points(sheet, cells, line, drawn)
    if lines:
        # the legend would list a line before the series, which are error bars
        sheet.axes.errorbar([], [], color=MUTED_COLOR, label=label, **FLAT_MARKS)


def _add_hover_points(sheet: Sheet, cells: Cells, line: LinePoints, drawn: DrawnColumn) -> None:
    for x, cell in zip(line.x, cells.rows_of(line.rows), strict=True):
        value = float(cell[drawn.column])
        if pd.notna(value):
            sheet.add_hover_point(x, value, point_text(line.series.label, cell, drawn))


def point_text(name: str, cell: Mapping[Any, Any], drawn: DrawnColumn) -> str:
    """Return `ulysses, 8k: 81,920 tokens/s, 95 % interval 80,100 to 83,000, n=12, ok`."""
    value = " ".join(filter(None, [metric_text(cell, drawn.column), drawn.unit]))
    parts = [value, _range_text(cell, drawn), drawn.samples(cell), status_label(shown_status(cell))]
    return f"{name}, {length_label(int(cell['seq_len']))}: {', '.join(filter(None, parts))}"


def _range_text(cell: Mapping[Any, Any], drawn: DrawnColumn) -> str:
    """Return `95 % interval 80,100 to 83,000`, or the band or range of the cell; empty without any."""
    noun, low, high = drawn.range_noun, drawn.low, drawn.high
    if drawn.band is not None and cell["provenance"] == Provenance.PREDICTED:
        noun, low, high = BAND, drawn.band.format("_low"), drawn.band.format("_high")
    if drawn.with_link is not None and cell["provenance"] == Provenance.REPLAYED:
        noun, low, high = LINK_RANGE, drawn.with_link, drawn.column
    if low is None or high is None or pd.isna(cell[low]) or pd.isna(cell[high]):
        return ""
    return f"{noun} {metric_text(cell, low)} to {metric_text(cell, high)}"


def _error_bars(rows: pd.DataFrame, drawn: DrawnColumn) -> list[pd.Series[float]] | None:
    """Return how far the bars reach down and up from the values; None if no cell has a bar.

    A distance is NaN for a cell without interval, band or range.
    """
    value = rows[drawn.column]
    low, high = (rows[end] if end else value * np.nan for end in (drawn.low, drawn.high))
    if drawn.band is not None:
        predicted = rows["provenance"].eq(Provenance.PREDICTED)
        low = low.where(~predicted, rows[drawn.band.format("_low")])
        high = high.where(~predicted, rows[drawn.band.format("_high")])
    if drawn.with_link is not None:
        replayed = rows["provenance"].eq(Provenance.REPLAYED)
        low, high = low.where(~replayed, rows[drawn.with_link]), high.where(~replayed, value)
    down, up = value - low, high - value
    return None if down.isna().all() else [down.clip(lower=0), up.clip(lower=0)]
