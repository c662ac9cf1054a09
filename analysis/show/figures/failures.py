"""Marks of cells without a result, in a strip above the axes of a figure."""

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
    NOT_KNOWN,
    PREDICTED,
    PREDICTED_OUT,
    REPLAY_UNDECIDED,
    UNDECIDED,
    shown_statuses,
)
from analysis.labels import status_label
from analysis.show.figures.sheet import (
    AXES_INCHES,
    WIDTH_INCHES,
    FittedText,
    Heading,
    Sheet,
    new_sheet,
    text_inches,
)
from analysis.show.figures.style import LENGTH, MUTED_COLOR, XScale, style_x_axis, x_limits

GLYPHS: Mapping[str, str] = {
    "out_of_memory": "x", PREDICTED_OUT: "x", UNDECIDED: "$?$", REPLAY_UNDECIDED: "$?$",
    EXCLUDED: "o", NOT_KNOWN: "o",
}  # fmt: skip
OTHER_GLYPH = "*"
LINE_INCHES = 0.16
MAX_ROWS = 16
MARK_SHARE = 0.03
"""Share of the width of the axes that a mark takes from its centre, with a gap."""
MIN_AXES_INCHES = 0.77 * WIDTH_INCHES
"""Approximate width of the axes."""
FONT_SIZE = 8.5
STRIP_COLOR = "#F6F6F6"


@dataclass(frozen=True, slots=True)
class FailureMark:
    """A row of the strip: failed cells with the same name and status."""

    name: str
    status: str
    color: str
    places: tuple[int, ...]
    """Values on the x axis, such as lengths."""

    def free_shares(self, limits: tuple[float, float]) -> tuple[float, float]:
        """Return the shares, 0..1, of a logarithmic axis to the left and to the right of the marks."""
        left, first, last, right = map(math.log, (limits[0], self.places[0], self.places[-1], limits[1]))
        return (first - left) / (right - left), (right - last) / (right - left)

    def has_room(self, limits: tuple[float, float]) -> bool:
        """Whether the label fits next to the marks."""
        free_share = max(self.free_shares(limits)) - MARK_SHARE
        return text_inches(self.label, FONT_SIZE) < MIN_AXES_INCHES * free_share

    @property
    def label(self) -> str:
        """Name and status, `ring: out of memory`."""
        has_label = self.status.startswith(PREDICTED) or self.status == REPLAY_UNDECIDED
        text = status_label(self.status) if has_label else self.status.replace("_", " ")
        return f"{self.name}: {text}" if self.name else text


def failure_marks(all_series: Sequence[Series], scale: XScale = LENGTH) -> list[FailureMark]:
    """Return a mark for the failed cells of every series and status.

    If there are more than MAX_ROWS marks or a label is too wide, there is one mark for each strategy and
    status. If these are still too many or too wide, there is one for each status.
    """
    marks: list[FailureMark] = []
    for name_of in (attrgetter("label"), attrgetter("strategy"), None):
        places_by_row: dict[tuple[str, str, str], set[int]] = {}
        for series in all_series:
            rows = series.rows[series.rows["status"] != "ok"]
            name, color = (name_of(series), series.style.color) if name_of else ("", MUTED_COLOR)
            for place, status in zip(rows[scale.column], shown_statuses(rows), strict=True):
                places_by_row.setdefault((name, color, status), set()).add(int(place))
        marks = [
            FailureMark(name, status, color, (*sorted(places),))
            for (name, color, status), places in places_by_row.items()
        ]
        has_room = all(text_inches(mark.label, FONT_SIZE) < MIN_AXES_INCHES for mark in marks)
        if len(marks) <= MAX_ROWS and has_room:
            break
    return marks


def sheet_against(
    scale: XScale, values: Sequence[int], heading: Heading, marks: Sequence[FailureMark], y_label: str
) -> Sheet:
    """Return a figure with axes against lengths or ranks, below a strip with the marks if there are any."""
    limits = x_limits(values)
    lines = [1 if mark.has_room(limits) else 2 for mark in marks]
    strip = [LINE_INCHES * (sum(lines) + 0.5)] if marks else []
    sheet = new_sheet(heading, [*strip, AXES_INCHES])
    sheet.axes.set_ylabel(y_label)
    for axes in sheet.panels:
        style_x_axis(axes, scale, values)
    for mark, last in zip(marks, accumulate(lines), strict=True):
        _draw_mark(sheet, mark, last - 1, limits)
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


def _draw_mark(sheet: Sheet, mark: FailureMark, line: int, limits: tuple[float, float]) -> None:
    """Draw a mark in one line of the strip, with its label next to it or, without room, in the line above."""
    axes, glyph = sheet.panels[0], GLYPHS.get(mark.status, OTHER_GLYPH)
    axes.plot(
        mark.places, [line] * len(mark.places), linestyle="none", color=mark.color, marker=glyph,
        fillstyle="none" if glyph == "o" else "full", markeredgewidth=0.4 if glyph.startswith("$") else 1.5,
    )  # fmt: skip
    left, right = mark.free_shares(limits)
    is_next_to_mark, is_left = mark.has_room(limits), left >= right
    label_end = left - MARK_SHARE if is_left else 1 - right + MARK_SHARE
    text = axes.text(
        label_end if is_next_to_mark else 0.99 * (not is_left), line - (not is_next_to_mark), mark.label,
        fontsize=FONT_SIZE, ha="right" if is_left == is_next_to_mark else "left", va="center",
        color=MUTED_COLOR, transform=axes.get_yaxis_transform(),
    )  # fmt: skip
    text.set_in_layout(False)
    share = max(left, right) - MARK_SHARE if is_next_to_mark else 1.0
    sheet.fitted.append(FittedText(text, axes, share))


def write_no_result(sheet: Sheet, cells: Cells) -> None:
    """Write on empty axes that no cell has a result, and how many cells ended with which status."""
    counts = shown_statuses(cells.frame).value_counts().items()
    statuses = ", ".join(f"{count} {status_label(str(status))}" for status, count in counts)
    text = sheet.axes.text(0.5, 0.5, f"No cell has a result ({statuses})", transform=sheet.axes.transAxes)
    text.set(horizontalalignment="center", color=MUTED_COLOR)
    sheet.axes.set_yticks([])
    sheet.fitted.append(FittedText(text, sheet.axes))
