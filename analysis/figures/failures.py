"""Cells without a result as marks at their lengths, in a strip on top of a figure's axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from analysis.cells.cells import Cells
from analysis.cells.series import Series
from analysis.cells.statuses import PREDICTED, RUNS_OUT, UNDECIDED, shown_statuses
from analysis.figures.sheet import AXES_INCHES, Heading, Sheet, new_sheet
from analysis.figures.style import LENGTH, MUTED_COLOR, Scale, style_x_axis
from analysis.labels import status_label
from analysis.metrics.traced_shares import is_void

EXCLUDED = "excluded (traced step not representative)"
NOT_KNOWN = "excluded (not known from the trace)"
GLYPHS: Mapping[str, str] = {
    "out_of_memory": "x", RUNS_OUT: "x", UNDECIDED: "$?$", EXCLUDED: "o", NOT_KNOWN: "o",
}  # fmt: skip
OTHER_GLYPH = "*"
LINE_INCHES = 0.15
MAX_ROWS = 8
STRIP_COLOR = "#F6F6F6"


@dataclass(frozen=True, slots=True)
class Mark:
    """Failed cells with one name and status: a row of the strip."""

    name: str
    status: str
    color: str
    places: tuple[int, ...]
    """The lengths, or whatever else the figure is against."""

    @property
    def label(self) -> str:
        """`ring: out of memory`."""
        is_predicted = self.status.startswith(PREDICTED)
        said = status_label(self.status) if is_predicted else self.status.replace("_", " ")
        return f"{self.name}: {said}" if self.name else said


def failure_marks(series: Sequence[Series], scale: Scale = LENGTH) -> list[Mark]:
    """Every failed cell: a row by series and status, by strategy and status, or by status where many."""
    marks: list[Mark] = []
    for name_of in (attrgetter("label"), attrgetter("strategy"), None):
        found: dict[tuple[str, str, str], set[int]] = {}
        for each in series:
            rows = each.rows[each.rows["status"] != "ok"]
            who = (name_of(each), each.style.color) if name_of else ("", MUTED_COLOR)
            for place, status in zip(rows[scale.column], shown_statuses(rows), strict=True):
                found.setdefault((*who, status), set()).add(int(place))
        marks = [Mark(name, status, color, (*sorted(at),)) for (name, color, status), at in found.items()]
        if len(marks) <= MAX_ROWS:
            break
    return marks


def with_excluded(cells: Cells, column: str) -> Cells:
    """The cells, with EXCLUDED or NOT_KNOWN as status where a trace left no value in this column."""
    status, ratio = cells.frame["status"], cells.frame["traced_to_timed"]
    is_missing = status.eq("ok") & ratio.notna() & cells.frame[column].isna()
    if not is_missing.any():
        return cells
    why = ratio[is_missing].map(lambda each: EXCLUDED if is_void(each) else NOT_KNOWN)
    return replace(cells, frame=cells.frame.assign(status=status.where(~is_missing, why)))


def with_undecided(cells: Cells) -> Cells:
    """The cells, with UNDECIDED as status where a prediction leaves open whether there is memory."""
    shown = shown_statuses(cells.frame)
    status = shown.where(shown.eq(UNDECIDED), cells.frame["status"])
    return replace(cells, frame=cells.frame.assign(status=status))


def sheet_against(
    scale: Scale, values: Sequence[int], heading: Heading, marks: Sequence[Mark], y_label: str
) -> Sheet:
    """Axes against lengths or ranks, beneath a strip with the marks where there are any."""
    strip = [LINE_INCHES * (2 * len(marks) + 0.5)] if marks else []
    sheet = new_sheet(heading, [*strip, AXES_INCHES])
    sheet.axes.set_ylabel(y_label)
    for axes in sheet.panels:
        style_x_axis(axes, scale, values)
    if marks:
        _draw(sheet, marks)
    return sheet


def _draw(sheet: Sheet, marks: Sequence[Mark]) -> None:
    """Each mark with its label in the line above it, at the end of the axes that it is nearer to."""
    axes = sheet.panels[0]
    axes.set_ylim(2 * len(marks), -0.5)
    axes.set_facecolor(STRIP_COLOR)
    axes.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
    axes.set_xlabel("")
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.grid(visible=False, axis="y")
    for row, mark in enumerate(marks):
        glyph = GLYPHS.get(mark.status, OTHER_GLYPH)
        thin = 0.4 if glyph.startswith("$") else 1.5
        axes.plot(
            mark.places, [2 * row + 1.25] * len(mark.places), linestyle="none", color=mark.color,
            marker=glyph, fillstyle="none" if glyph == "o" else "full", markeredgewidth=thin, clip_on=False,
        )  # fmt: skip
        ends = axes.transAxes.inverted().transform(axes.transData.transform([(x, 0) for x in mark.places]))
        is_right = ends[:, 0].mean() > 1 / 2
        text = axes.text(
            0.99 if is_right else 0.01, 2 * row + 0.3, mark.label, ha="right" if is_right else "left",
            va="center", fontsize=8.5, color=MUTED_COLOR, transform=axes.get_yaxis_transform(),
        )  # fmt: skip
        text.set_in_layout(False)
        sheet.fitted.append((text, axes))


def say_empty(sheet: Sheet, cells: Cells) -> None:
    """Where no cell has a result, that none has, and how they ended."""
    counts = shown_statuses(cells.frame).value_counts().items()
    why = ", ".join(f"{count} {status_label(str(status))}" for status, count in counts)
    text = sheet.axes.text(0.5, 0.5, f"No cell has a result ({why})", transform=sheet.axes.transAxes)
    text.set(horizontalalignment="center", color=MUTED_COLOR)
    sheet.axes.set_yticks([])
    sheet.fitted.append((text, sheet.axes))
