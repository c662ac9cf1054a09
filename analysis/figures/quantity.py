"""A column of the frame as a figure draws it: where its points stand, and what one says when pointed at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.series import Series
from analysis.cells.statuses import shown_status
from analysis.figures.style import dodge
from analysis.labels import n_label, status_label
from analysis.metrics.definitions import text_of
from bench.labels import length_label
from bench.record import Provenance

BAND = "band of the model"


@dataclass(frozen=True, slots=True)
class Quantity:
    """A column to draw, with the columns of its interval where it has one."""

    column: str
    noun: str
    low: str | None = None
    high: str | None = None
    range_noun: str = "range"
    """What lies between these two."""
    band: str | None = None
    """Of predicted cells the columns of the band, with {} where the end is named."""
    unit: str = ""
    """After the value, where its column does not say it."""
    samples: Callable[[Mapping[Any, Any]], str] = lambda cell: f"n={n_label(cell)}" if n_label(cell) else ""
    """How many a cell's value is of."""


@dataclass(frozen=True, slots=True)
class Area:
    """A point or a bar in the data of a figure's axes, and what it says when pointed at."""

    x: tuple[float, float]
    """Begin and end; equal of a point, as is the next one."""
    y: tuple[float, float]
    text: str


def placed(series: Sequence[Series], column: str) -> Iterator[tuple[Series, pd.DataFrame, pd.Series[float]]]:
    """Each series that has a value in this column, its cells by length, and where on the x axis they stand.

    Cells without a value stay in, as gaps: a line must not run across a failure.
    """
    drawn = [each for each in series if each.rows[column].notna().any()]
    lengths = sorted({int(length) for each in drawn for length in each.rows["seq_len"]})
    for number, each in enumerate(drawn):
        rows = each.rows.sort_values("seq_len")
        yield each, rows, rows["seq_len"] * dodge(number, len(drawn), lengths)


def areas_of(*quantities: Quantity) -> Callable[[Cells], Iterator[Area]]:
    """What can be pointed at in a figure of these quantities against length: every point."""
    return lambda cells: (area for each in quantities for area in _areas(cells, each))


def _areas(cells: Cells, quantity: Quantity) -> Iterator[Area]:
    for each, rows, places in placed(cells.series, quantity.column):
        for x, cell in zip(places, cells.rows_of(rows), strict=True):
            value = float(cell[quantity.column])
            if pd.notna(value):
                yield Area((x, x), (value, value), point_text(each.label, cell, quantity))


def point_text(name: str, cell: Mapping[Any, Any], quantity: Quantity) -> str:
    """`ulysses, 8k: 81,920 tokens/s, 95 % interval 80,100 to 83,000, n=12, ok`."""
    value = " ".join(filter(None, [text_of(cell, quantity.column), quantity.unit]))
    parts = [value, _range(cell, quantity), quantity.samples(cell), status_label(shown_status(cell))]
    return f"{name}, {length_label(int(cell['seq_len']))}: {', '.join(filter(None, parts))}"


def _range(cell: Mapping[Any, Any], quantity: Quantity) -> str:
    is_band = quantity.band is not None and cell["provenance"] == Provenance.PREDICTED
    noun = BAND if is_band else quantity.range_noun
    low, high = (
        (quantity.band.format("_low"), quantity.band.format("_high"))
        if is_band and quantity.band is not None
        else (quantity.low, quantity.high)
    )
    if low is None or high is None or pd.isna(cell[low]) or pd.isna(cell[high]):
        return ""
    return f"{noun} {text_of(cell, low)} to {text_of(cell, high)}"
