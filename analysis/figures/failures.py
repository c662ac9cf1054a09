"""The lane at the top of a figure in which the cells without a result stand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from operator import attrgetter
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from analysis.cells.cells import Cells
from analysis.cells.series import Series
from analysis.cells.statuses import RUNS_OUT, UNDECIDED, shown_statuses
from analysis.figures.style import LENGTH, MUTED_COLOR, Scale, is_narrow, x_limits
from analysis.labels import status_label
from analysis.metrics.traced_shares import is_void

VOID, NOT_KNOWN = "void", "not known"
QUESTION = "$?$"
GLYPHS: Mapping[str, str] = {"out_of_memory": "x", RUNS_OUT: "x", UNDECIDED: QUESTION}
OTHER_GLYPH = "*"
TEXT: Mapping[str, Any] = {"fontsize": 8, "color": MUTED_COLOR}
ROW_INCHES = 0.17
MAX_ROWS = 12
GLYPH_FRACTION, LETTER_FRACTION = 0.02, 0.015
"""Half of a glyph with its gap, and a letter of its text, as fractions of the axes; rather too wide."""
RIGHT_END = 0.95
"""Texts end here, so that they stand apart from the names of series on their right."""
MAX_LANE = 0.6
"""The lane never takes more than this fraction of the axes, however many rows it has."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Failed cells of one series and status at neighbouring lengths, named once."""

    places: tuple[int, ...]
    """The lengths, or whatever else the figure is against."""
    status: str
    color: str
    series: str
    row: int
    """Of the lane, from the top."""


def failure_marks(series: Sequence[Series], scale: Scale = LENGTH) -> list[Mark]:
    """Every failed cell: rows for each series that has one, or for each strategy where those are many.

    A series has one row, and more where the texts of its marks would overlap.
    """
    failing = [each for each in series if each.rows["status"].ne("ok").any()]
    name = attrgetter("label" if len(failing) <= MAX_ROWS else "strategy")
    failed: dict[tuple[str, str], set[tuple[int, str]]] = {}
    for each in failing:
        rows = each.rows[each.rows["status"] != "ok"]
        found = zip(map(int, rows[scale.column]), shown_statuses(rows), strict=True)
        failed.setdefault((name(each), each.style.color), set()).update(found)
    places = sorted({place for each in series for place in scale.values(each.rows)})
    marks: list[Mark] = []
    for (label, color), cells in failed.items():
        first_row = 1 + max((mark.row for mark in marks), default=-1)
        for row, status, run in _in_rows(_runs(cells, places), x_limits(places)):
            marks.append(Mark(run, status, color, label, first_row + row))
    return marks


@lru_cache(maxsize=4)  # both widths of a figure ask for the same, for their height and to draw them
def length_marks(cells: Cells) -> Sequence[Mark]:
    """Those of the cells' own series, against length."""
    return failure_marks(cells.series)


def _runs(cells: Iterable[tuple[int, str]], places: Sequence[int]) -> list[tuple[str, tuple[int, ...]]]:
    """Status and places of failures at neighbouring places with one status, by first place."""
    before = {longer: shorter for shorter, longer in pairwise(places)}
    runs: list[tuple[str, tuple[int, ...]]] = []
    for place, status in sorted(cells):
        goes_on = bool(runs) and runs[-1][0] == status and runs[-1][1][-1] == before.get(place)
        run = runs.pop()[1] if goes_on else ()
        runs.append((status, (*run, place)))
    return runs


def _in_rows(
    runs: Iterable[tuple[str, tuple[int, ...]]], limits: tuple[float, float]
) -> Iterator[tuple[int, str, tuple[int, ...]]]:
    """Each run with the first row in which it has room, counted from 0."""
    ends: list[float] = []
    for status, run in runs:
        start, end = _extent(run, status, limits)
        row = next((row for row, taken in enumerate(ends) if taken < start), len(ends))
        ends[row : row + 1] = [end]
        yield row, status, run


def _extent(run: Sequence[int], status: str, limits: tuple[float, float]) -> tuple[float, float]:
    """Where glyphs and text of a mark begin and end, as fractions of the axes."""
    first, last = (_fraction(place, limits) for place in (run[0], run[-1]))
    text = _text_fraction(status)
    place, is_left = _text_place(run, status, limits)
    if is_left:
        return first - text, last + GLYPH_FRACTION
    return first - GLYPH_FRACTION, max(last + GLYPH_FRACTION, _fraction(place, limits) + text)


def _text_fraction(status: str) -> float:
    return GLYPH_FRACTION + LETTER_FRACTION * len(status_label(status))


def _text_place(run: Sequence[int], status: str, limits: tuple[float, float]) -> tuple[int, bool]:
    """Beside which glyph a text stands, and whether on its left: where it stays within the axes.

    A run across all of the axes has its text between the two glyphs that are furthest apart.
    """
    text = _text_fraction(status)
    if _fraction(run[-1], limits) + text <= RIGHT_END:
        return run[-1], False
    if _fraction(run[0], limits) - text >= 0:
        return run[0], True
    return max(pairwise(run), key=lambda pair: pair[1] / pair[0], default=(run[0],))[0], False


def _fraction(place: float, limits: tuple[float, float]) -> float:
    """Where on the logarithmic x axis this place stands, 0..1."""
    left, right = limits
    return math.log(place / left) / math.log(right / left)


@lru_cache(maxsize=4)  # both widths of a figure ask for the same
def with_void(cells: Cells, column: str) -> Cells:
    """The cells, with `void` or `not known` as status where a trace left no value in this column."""
    status, ratio = cells.frame["status"], cells.frame["traced_to_timed"]
    is_missing = status.eq("ok") & ratio.notna() & cells.frame[column].isna()
    if not is_missing.any():
        return cells
    why = ratio[is_missing].map(lambda each: VOID if is_void(each) else NOT_KNOWN)
    return replace(cells, frame=cells.frame.assign(status=status.where(~is_missing, why)))


@lru_cache(maxsize=4)  # both widths of a figure ask for the same
def with_undecided(cells: Cells) -> Cells:
    """The cells, with UNDECIDED as status where a prediction leaves open whether there is memory."""
    shown = shown_statuses(cells.frame)
    is_undecided = shown.eq(UNDECIDED)
    if not is_undecided.any():
        return cells
    return replace(cells, frame=cells.frame.assign(status=shown.where(is_undecided, cells.frame["status"])))


def draw_failures(axes: Axes, marks: Sequence[Mark]) -> None:
    """Make room above the data and draw the marks there; call it when the data's limits are final."""
    if not marks:
        return
    lines = lane_lines(marks, narrow=is_narrow(axes))
    line_height = min(ROW_INCHES / height_inches(axes), MAX_LANE / (lines + 1))
    lane = line_height * (lines + 0.5)
    _make_room(axes, lane)
    axes.plot([0, 1], [1 - lane] * 2, color=MUTED_COLOR, lw=0.6, transform=axes.transAxes)
    y_of = [1 - line_height * (line + 0.75) for line in range(lines)]
    (_draw_named_above if is_narrow(axes) else _draw_named_beside)(axes, marks, y_of)


def lane_lines(marks: Sequence[Mark], *, narrow: bool) -> int:
    """How many lines of text the marks take; on a narrow figure two for each series and status."""
    if narrow:
        return 2 * len({(mark.series, mark.status) for mark in marks})
    return 1 + max((mark.row for mark in marks), default=-1)


def _draw_named_beside(axes: Axes, marks: Sequence[Mark], y_of: Sequence[float]) -> None:
    """Each mark with its status beside it, and the name of its series right of the axes."""
    first_rows: dict[str, int] = {}
    for mark in marks:
        _draw_glyphs(axes, mark, y_of[mark.row])
        _write_status(axes, mark, y_of[mark.row])
        first_rows.setdefault(mark.series, mark.row)
    for name, row in first_rows.items():
        axes.text(1.01, y_of[row], name, transform=axes.transAxes, va="center", **TEXT)


def _draw_named_above(axes: Axes, marks: Sequence[Mark], y_of: Sequence[float]) -> None:
    """All marks of a series and status in a line, with both named in the line above."""
    kinds = [*dict.fromkeys((mark.series, mark.status) for mark in marks)]
    for mark in marks:
        _draw_glyphs(axes, mark, y_of[2 * kinds.index((mark.series, mark.status)) + 1])
    for number, (name, status) in enumerate(kinds):
        text = f"{name}: {status_label(status)}"
        axes.text(0.02, y_of[2 * number], text, transform=axes.transAxes, va="center", **TEXT)


def count_failures(cells: Cells) -> str:
    """How the cells without a result ended: `3 OOM, 1 timed out`; empty where all went well."""
    counts = shown_statuses(cells.frame[cells.frame["status"] != "ok"]).value_counts()
    return ", ".join(f"{count} {status_label(str(status))}" for status, count in counts.items())


def _draw_glyphs(axes: Axes, mark: Mark, y: float) -> None:
    """A mark at its places, in its strategy's colour; `y` in axes fractions."""
    glyph = GLYPHS.get(mark.status, OTHER_GLYPH)
    look: dict[str, Any] = {
        "color": mark.color,
        "marker": glyph,
        "ms": 6,
        "mew": 0.4 if glyph == QUESTION else 1.5,
    }
    heights = [y] * len(mark.places)
    axes.plot(mark.places, heights, linestyle="none", transform=axes.get_xaxis_transform(), zorder=4, **look)


def _write_status(axes: Axes, mark: Mark, y: float) -> None:
    """A mark's text on the side that has room."""
    place, on_left = _text_place(mark.places, mark.status, axes.get_xlim())
    axes.annotate(
        status_label(mark.status),
        (place, y),
        xycoords=axes.get_xaxis_transform(),
        xytext=(-6 if on_left else 6, 0),
        textcoords="offset points",
        ha="right" if on_left else "left",
        va="center",
        **TEXT,
    )


def height_inches(axes: Axes) -> float:
    """How high the axes are, in inches."""
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
