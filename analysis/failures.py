"""The lane at the top of a figure in which the cells without a result stand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from analysis.labels import status_label
from analysis.series import Series
from analysis.style import MUTED_COLOR, look_of

GLYPHS: Mapping[str, str] = {"out_of_memory": "x"}
OTHER_GLYPH = "*"
TEXT: Mapping[str, Any] = {"fontsize": 7, "color": MUTED_COLOR}
ROW_INCHES = 0.17
MAX_ROWS = 12
TEXT_TURNS_AT = 0.7
"""Beyond this part of the length axis a text stands on the left of its glyph."""
MAX_LANE = 0.6
"""The lane never takes more than this fraction of the axes, however many rows it has."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One failed cell: its length and status, and the row and name of its series."""

    seq_len: int
    status: str
    strategy: str
    series: str
    row: int


def failure_marks(series: Sequence[Series]) -> list[Mark]:
    """Every failed cell: a row for each series that has one, or for each strategy where those are many."""
    failing = [(each, each.rows[each.rows["status"] != "ok"]) for each in series]
    failing = [(each, rows) for each, rows in failing if not rows.empty]
    name = attrgetter("label" if len(failing) <= MAX_ROWS else "strategy")
    row_of = {label: row for row, label in enumerate(dict.fromkeys(name(each) for each, _ in failing))}
    marks = [
        Mark(int(seq_len), status, each.strategy, name(each), row_of[name(each)])
        for each, rows in failing
        for seq_len, status in zip(rows["seq_len"], rows["status"], strict=True)
    ]
    return [*dict.fromkeys(marks)]


def draw_failures(axes: Axes, marks: Sequence[Mark]) -> None:
    """Make room above the data and draw the marks there; call it when the data's limits are final."""
    if not marks:
        return
    rows = 1 + max(mark.row for mark in marks)
    row_height = min(ROW_INCHES / _height_inches(axes), MAX_LANE / (rows + 1))
    lane = row_height * (rows + 0.5)
    _make_room(axes, lane)
    axes.plot([0, 1], [1 - lane] * 2, color=MUTED_COLOR, lw=0.6, transform=axes.transAxes)
    y_of = {mark.row: 1 - row_height * (mark.row + 0.75) for mark in marks}
    for mark in marks:
        _draw_mark(axes, mark, y_of[mark.row])
    for row, name in {mark.row: mark.series for mark in marks}.items():
        axes.text(1.01, y_of[row], name, transform=axes.transAxes, va="center", **TEXT)


def count_failures(summary: pd.DataFrame) -> str:
    """How the cells without a result ended: `3 OOM, 1 timed out`; empty where all went well."""
    counts = summary.loc[summary["status"] != "ok", "status"].value_counts()
    return ", ".join(f"{count} {status_label(str(status))}" for status, count in counts.items())


def _draw_mark(axes: Axes, mark: Mark, y: float) -> None:
    """One glyph in its strategy's colour, its text on the side that has room; `y` in axes fractions."""
    transform = axes.get_xaxis_transform()
    glyph, color = GLYPHS.get(mark.status, OTHER_GLYPH), look_of(mark.strategy).color
    axes.plot(mark.seq_len, y, glyph, color=color, ms=6, mew=1.5, transform=transform, zorder=4)
    left, right = axes.get_xlim()
    on_left = math.log(mark.seq_len / left) > TEXT_TURNS_AT * math.log(right / left)
    axes.annotate(
        status_label(mark.status),
        (mark.seq_len, y),
        xycoords=transform,
        xytext=(-6 if on_left else 6, 0),
        textcoords="offset points",
        ha="right" if on_left else "left",
        va="center",
        **TEXT,
    )


def _height_inches(axes: Axes) -> float:
    figure = axes.get_figure(root=True)
    return float(axes.bbox.height) / (figure.dpi if figure is not None else 100)


def _make_room(axes: Axes, lane: float) -> None:
    """Raise the upper limit so that data and ticks end below the top `lane` of the axes."""
    bottom, top = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if bottom <= tick <= top]
    if axes.get_yscale() == "log":
        axes.set_ylim(bottom, bottom * (top / bottom) ** (1 / (1 - lane)))
    else:
        axes.set_ylim(bottom, bottom + (top - bottom) / (1 - lane))
    axes.set_yticks(ticks)
    axes.yaxis.set_minor_locator(NullLocator())
