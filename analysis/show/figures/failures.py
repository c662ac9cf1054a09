"""Cells without a result as marks at their lengths, in a strip on top of a figure's axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import attrgetter

from matplotlib.axes import Axes

from analysis.cells.cells import Cells
from analysis.cells.series import Series
from analysis.cells.statuses import (
    EXCLUDED,
    NO_SPARE,
    NOT_KNOWN,
    PREDICTED,
    RUNS_OUT,
    UNDECIDED,
    shown_statuses,
)
from analysis.labels import status_label
from analysis.show.figures.sheet import AXES_INCHES, WIDTH_INCHES, Heading, Sheet, inches_of, new_sheet
from analysis.show.figures.style import LENGTH, MUTED_COLOR, Scale, style_x_axis, x_limits

GLYPHS: Mapping[str, str] = {
    "out_of_memory": "x", RUNS_OUT: "x", UNDECIDED: "$?$", NO_SPARE: "$?$", EXCLUDED: "o", NOT_KNOWN: "o",
}  # fmt: skip
OTHER_GLYPH = "*"
LINE_INCHES = 0.16
MAX_ROWS = 16
BESIDE = 0.03  # what a mark takes of the axes, from its middle, with a gap
LEAST_INCHES = 0.77 * WIDTH_INCHES  # about how wide the axes are
SIZE = 8.5
STRIP_COLOR = "#F6F6F6"


@dataclass(frozen=True, slots=True)
class Mark:
    """Failed cells with one name and status: a row of the strip."""

    name: str
    status: str
    color: str
    places: tuple[int, ...]
    """The lengths, or whatever else the figure is against."""

    def free(self, limits: tuple[float, float]) -> tuple[float, float]:
        """How much of a logarithmic axis is free on the left and on the right of the marks, 0..1 each."""
        left, first, last, right = map(math.log, (limits[0], self.places[0], self.places[-1], limits[1]))
        return (first - left) / (right - left), (right - last) / (right - left)

    def has_room(self, limits: tuple[float, float]) -> bool:
        """Whether the label fits beside the marks."""
        return inches_of(self.label, SIZE) < LEAST_INCHES * (max(self.free(limits)) - BESIDE)

    @property
    def label(self) -> str:
        """`ring: out of memory`."""
        has_label = self.status.startswith(PREDICTED) or self.status == NO_SPARE
        said = status_label(self.status) if has_label else self.status.replace("_", " ")
        return f"{self.name}: {said}" if self.name else said


def failure_marks(series: Sequence[Series], scale: Scale = LENGTH) -> list[Mark]:
    """Every failed cell: a row by series and status, by strategy and status, or by status where too many."""
    marks: list[Mark] = []
    for name_of in (attrgetter("label"), attrgetter("strategy"), None):
        found: dict[tuple[str, str, str], set[int]] = {}
        for each in series:
            rows = each.rows[each.rows["status"] != "ok"]
            who = (name_of(each), each.style.color) if name_of else ("", MUTED_COLOR)
            for place, status in zip(rows[scale.column], shown_statuses(rows), strict=True):
                found.setdefault((*who, status), set()).add(int(place))
        marks = [Mark(name, status, color, (*sorted(at),)) for (name, color, status), at in found.items()]
        if len(marks) <= MAX_ROWS and all(inches_of(mark.label, SIZE) < LEAST_INCHES for mark in marks):
            break
    return marks


def sheet_against(
    scale: Scale, values: Sequence[int], heading: Heading, marks: Sequence[Mark], y_label: str
) -> Sheet:
    """Axes against lengths or ranks, beneath a strip with the marks where there are any."""
    limits = x_limits(values)
    lines = [1 if mark.has_room(limits) else 2 for mark in marks]
    strip = [LINE_INCHES * (sum(lines) + 0.5)] if marks else []
    sheet = new_sheet(heading, [*strip, AXES_INCHES])
    sheet.axes.set_ylabel(y_label)
    for axes in sheet.panels:
        style_x_axis(axes, scale, values)
    for mark, last in zip(marks, accumulate(lines), strict=True):
        _draw(sheet, mark, last - 1, limits)
    if marks:
        _style_strip(sheet.panels[0], sum(lines))
    return sheet


def _style_strip(axes: Axes, lines: int) -> None:
    axes.set_ylim(lines - 0.25, -0.75)
    axes.set_facecolor(STRIP_COLOR)
    axes.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
    axes.set_xlabel("")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(visible=False, axis="y")


def _draw(sheet: Sheet, mark: Mark, line: int, limits: tuple[float, float]) -> None:
    """The marks in this line of the strip; their label beside them, or in the line above."""
    axes, glyph = sheet.panels[0], GLYPHS.get(mark.status, OTHER_GLYPH)
    axes.plot(
        mark.places, [line] * len(mark.places), linestyle="none", color=mark.color, marker=glyph,
        fillstyle="none" if glyph == "o" else "full", markeredgewidth=0.4 if glyph.startswith("$") else 1.5,
    )  # fmt: skip
    left, right = mark.free(limits)
    is_beside, is_left = mark.has_room(limits), left >= right
    beside = left - BESIDE if is_left else 1 - right + BESIDE
    text = axes.text(
        beside if is_beside else 0.99 * (not is_left), line - (not is_beside), mark.label, fontsize=SIZE,
        ha="right" if is_left == is_beside else "left", va="center", color=MUTED_COLOR,
        transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    text.set_in_layout(False)
    sheet.fitted.append((text, axes, max(left, right) - BESIDE if is_beside else 1.0))


def say_empty(sheet: Sheet, cells: Cells) -> None:
    """Where no cell has a result, that none has, and how they ended."""
    counts = shown_statuses(cells.frame).value_counts().items()
    why = ", ".join(f"{count} {status_label(str(status))}" for status, count in counts)
    text = sheet.axes.text(0.5, 0.5, f"No cell has a result ({why})", transform=sheet.axes.transAxes)
    text.set(horizontalalignment="center", color=MUTED_COLOR)
    sheet.axes.set_yticks([])
    sheet.fitted.append((text, sheet.axes, 1.0))
