"""One traced step from ideal attention down to the whole, part by part: a panel for each strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.cells.cells import Cells
from analysis.cells.parts import Cell, Part, has_ideal, part_text, step_ms, waterfall_of
from analysis.cells.series import Series
from analysis.labels import count_label, number_label, percent_label
from analysis.show.figures.sheet import MARGIN_INCHES, WIDTH_INCHES, Heading, Sheet, Spot, new_sheet
from analysis.show.figures.style import MUTED_COLOR
from bench.common.labels import length_label

ROW_INCHES, TITLE_INCHES = 0.165, 0.1
MAX_PANELS = 6
MANY_MS = 10_000
"""From here on times are in seconds."""
BAR_HEIGHT = 0.74
WITHOUT_IDEAL = "From attention to the whole step"
WHOLE = "whole step"
IDEAL_IS = (
    "Ideal attention: local's attention time for the same work, times local's {of}, divided by the cell's;"
    " where a strategy's took less than that, its bar beyond ideal goes to the left"
)


def waterfall_sheet(cells: Cells, heading: Heading) -> Sheet:
    """The length at which most series have a traced step, the longest of equals; `local` on top."""
    frame = cells.frame[cells.frame["part_attention_ms"].notna()]
    counts = frame["seq_len"].value_counts()
    length = int(counts.index[counts == counts.max()].max())
    rows = frame.index[frame["seq_len"] == length]
    chosen = [(each, row) for each in cells.series for row in each.rows.index.intersection(rows)]
    shown = [(each, cells.rows_of(cells.frame.loc[[row]])[0]) for each, row in chosen[:MAX_PANELS]]
    known = [has_ideal(cell) for _, cell in shown]
    heading = replace(heading, title=heading.title if any(known) else WITHOUT_IDEAL)
    heights = [ROW_INCHES * (len(waterfall_of(cell)) + 1) + TITLE_INCHES for _, cell in shown]
    sheet = new_sheet(heading, heights)
    end_ms = max(ms for _, cell in shown for ms in (step_ms(cell), waterfall_of(cell)[0][1]))
    unit, unit_ms = ("s", 1e3) if end_ms >= MANY_MS else ("ms", 1.0)
    for axes, (each, cell) in zip(sheet.panels, shown, strict=True):
        _draw(sheet, axes, each, cell, unit_ms)
        axes.set_xlim(0, end_ms / unit_ms)
    sheet.axes.tick_params(labelbottom=True)
    sheet.axes.set_xlabel(f"{unit} of one step at {length_label(length)}")
    _explain(sheet, cells, length, known)
    if len(chosen) > MAX_PANELS:
        sheet.remarks.append(f"{count_label(len(chosen) - MAX_PANELS, 'more cell')} in summary.csv")
    return sheet


def _explain(sheet: Sheet, cells: Cells, length: int, known: list[bool]) -> None:
    """What is ideal here, or that it is not known."""
    of = "cores" if cells.is_cpu else "GPUs"
    if any(known):
        sheet.remarks.append(IDEAL_IS.format(of=of))
    if not all(known):
        sheet.remarks.append(
            f"Without an ideal where local has no traced step of the same work at {length_label(length)}"
        )
    if len({*cells.frame["seq_len"]}) > 1:
        sheet.remarks.append("The details of each cell have its parts at the other lengths")


def _draw(sheet: Sheet, axes: Axes, each: Series, cell: Cell, unit_ms: float) -> None:
    whole = Part(WHOLE, each.style.color, ())
    bars = [*waterfall_of(cell), (whole, step_ms(cell))]
    start, name = 0.0, f"{each.label}, {length_label(int(cell['seq_len']))}"
    for row, (part, ms) in enumerate(bars):
        left, width = (0.0 if part is whole else start), ms / unit_ms
        look: dict[str, Any] = {"color": part.color, "hatch": part.hatch, "edgecolor": "white"}
        axes.barh(row, width, left=left, height=BAR_HEIGHT, linewidth=0, **look)
        share = "" if part is whole else f", {percent_label(ms / step_ms(cell))}"
        axes.annotate(
            f"{number_label(width)}{share}", (max(left, left + width), row), xytext=(3, 0),
            textcoords="offset points", va="center", fontsize=8.5,
        )  # fmt: skip
        heights = (row - BAR_HEIGHT / 2, row + BAR_HEIGHT / 2)
        text = f"{name}: {part_text(part.label, ms, cell)}"
        sheet.spots.append(Spot(axes, (left, left + width), heights, text))
        start = left + width
        if row + 2 < len(bars):
            axes.plot([start, start], [row, row + 1], color=MUTED_COLOR, linewidth=0.6)
    axes.set_yticks(range(len(bars)), [part.label for part, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_title(" ", fontsize=9, pad=3)
    title = axes.annotate(
        each.label, (MARGIN_INCHES / WIDTH_INCHES, 1), xycoords=("figure fraction", "axes fraction"),
        xytext=(0, 4), textcoords="offset points", fontweight="bold", annotation_clip=False,
    )  # fmt: skip
    sheet.fitted.append((title, sheet.figure, 1.0))
    axes.tick_params(axis="y", length=0)
    axes.tick_params(labelbottom=False)
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.grid(visible=False, axis="y")
