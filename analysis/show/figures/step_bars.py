"""Figure of the parts of a traced step: one stacked bar for each cell, by length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from analysis.cells.cells import Cells
from analysis.cells.parts import HAS_PARTS_COLUMN, part_text, parts_of, step_ms
from analysis.cells.statuses import excluded_statuses
from analysis.read.step_parts import BEYOND_IDEAL
from analysis.show.figures.failures import failure_marks, sheet_against
from analysis.show.figures.sheet import Heading, HoverArea, Sheet
from analysis.show.figures.style import LENGTH, PERCENT, plot_options
from bench.common.labels import length_label

MAX_BARS = 120
"""Largest number of bars: more cannot be distinguished, and a bar is as slow to draw as a hundred points."""
BARS_SHARE = 0.68
"""Share of the distance between two lengths that their bars fill."""
MARKER_Y = -0.05
IDEAL_REMARK = (
    "Ideal attention: attention time of local for the same work, shared evenly by the cell's cores or GPUs"
)


def step_parts_sheet(cells: Cells, heading: Heading) -> Sheet:
    """Return a figure with a bar for each cell, of its parts as shares of its step, above a series mark."""
    lengths = LENGTH.values(cells.frame)
    places = {length: 2**number for number, length in enumerate(lengths)}  # equal distances on a log axis
    scale = replace(LENGTH, label=lambda place: length_label(lengths[place.bit_length() - 1]))
    marks = [
        replace(mark, places=tuple(places[length] for length in mark.places))
        for mark in failure_marks(
            cells.with_statuses(excluded_statuses(cells.frame, HAS_PARTS_COLUMN)).series
        )
    ]
    label = f"share of the {'expected' if cells.is_all_predicted else 'traced'} step"
    sheet = sheet_against(scale, [*places.values()], heading, marks, label)
    axes = sheet.axes
    axes.set_ylim(2 * MARKER_Y, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PERCENT)
    axes.grid(visible=False, axis="x")
    drawn = [series for series in cells.series if series.rows[HAS_PARTS_COLUMN].notna().any()]
    width, bars_left = BARS_SHARE / len(drawn), MAX_BARS
    for number, series in enumerate(drawn):
        rows = series.rows[series.rows[HAS_PARTS_COLUMN].notna()].head(bars_left)
        if rows.empty:
            break
        bars_left -= len(rows)
        x = rows["seq_len"].map(places) * 2 ** ((number - (len(drawn) - 1) / 2) * width)
        options = plot_options(series.style, series.variant_number) | {"linestyle": "none"}
        axes.plot(x, [MARKER_Y] * len(rows), markersize=5, label=series.label, **options)
        for place, cell in zip(x, cells.rows_of(rows), strict=True):
            ends = (place * 2 ** (-width * 0.45), place * 2 ** (width * 0.45))
            _draw_bar(sheet, series.label, cell, ends)
    if cells.frame[BEYOND_IDEAL].gt(0).any():
        sheet.remarks.append(IDEAL_REMARK)
    if cells.frame[HAS_PARTS_COLUMN].notna().sum() > MAX_BARS:
        sheet.remarks.append(f"Left out: cells after the first {MAX_BARS}")
    return sheet


def _draw_bar(sheet: Sheet, label: str, cell: Mapping[Any, Any], ends: tuple[float, float]) -> None:
    """Draw the parts of a cell's step on top of each other; `ends` are the x values of both edges."""
    whole_ms, bottom = step_ms(cell), 0.0
    for part, ms in parts_of(cell):
        share = ms / whole_ms
        sheet.axes.bar(
            ends[0], share, ends[1] - ends[0], bottom, align="edge", color=part.color, label=part.label,
            hatch=part.hatch, edgecolor="white", linewidth=0,
        )  # fmt: skip
        text = f"{label}, {length_label(int(cell['seq_len']))}: {part_text(part.label, ms, cell)}"
        sheet.hover_areas.append(HoverArea(sheet.axes, ends, (bottom, bottom + share), text))
        bottom += share
