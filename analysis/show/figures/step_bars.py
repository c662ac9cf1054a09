"""Where a traced step went: a bar of the whole step for each cell, by length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from analysis.cells.cells import Cells
from analysis.cells.parts import SPLIT, part_text, parts_of, step_ms
from analysis.cells.statuses import excluded_statuses
from analysis.show.figures.failures import failure_marks, sheet_against
from analysis.show.figures.sheet import Heading, Sheet, Spot
from analysis.show.figures.style import LENGTH, PERCENT, look_of
from bench.common.labels import length_label

MAX_BARS = 120  # nobody can tell more apart, and each takes the time of a hundred points
BAR_ROOM = 0.68  # the part of the gap between two lengths that their bars fill
MARKER_Y = -0.05


def step_parts_sheet(cells: Cells, heading: Heading) -> Sheet:
    """The traced step of every cell as one bar, each part a share of it, above its strategy's mark."""
    lengths = LENGTH.values(cells.frame)
    places = {length: 2**number for number, length in enumerate(lengths)}
    scale = replace(LENGTH, label=lambda place: length_label(lengths[place.bit_length() - 1]))
    marks = [
        replace(mark, places=tuple(places[length] for length in mark.places))
        for mark in failure_marks(cells.with_statuses(excluded_statuses(cells.frame, SPLIT)).series)
    ]
    label = f"share of the {'expected' if cells.is_all_predicted else 'traced'} step"
    sheet = sheet_against(scale, [*places.values()], heading, marks, label)
    axes = sheet.axes
    axes.set_ylim(2 * MARKER_Y, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PERCENT)
    axes.grid(visible=False, axis="x")
    drawn = [each for each in cells.series if each.rows[SPLIT].notna().any()]
    room, left = BAR_ROOM / len(drawn), MAX_BARS
    for number, each in enumerate(drawn):
        rows = each.rows[each.rows[SPLIT].notna()].head(left)
        if rows.empty:
            break
        left -= len(rows)
        x = rows["seq_len"].map(places) * 2 ** ((number - (len(drawn) - 1) / 2) * room)
        look = look_of(each.style, each.variant_number) | {"linestyle": "none"}
        axes.plot(x, [MARKER_Y] * len(rows), markersize=5, label=each.label, **look)
        for place, cell in zip(x, cells.rows_of(rows), strict=True):
            _draw_bar(sheet, each.label, cell, (place * 2 ** (-room * 0.45), place * 2 ** (room * 0.45)))
    if cells.frame[SPLIT].notna().sum() > MAX_BARS:
        sheet.remarks.append(f"Only the first {MAX_BARS} cells")
    return sheet


def _draw_bar(sheet: Sheet, label: str, cell: Mapping[Any, Any], ends: tuple[float, float]) -> None:
    whole_ms, bottom = step_ms(cell), 0.0
    for part, ms in parts_of(cell):
        share = ms / whole_ms
        sheet.axes.bar(
            ends[0], share, ends[1] - ends[0], bottom, align="edge", color=part.color, label=part.label,
            hatch=part.hatch, edgecolor="white", linewidth=0,
        )  # fmt: skip
        text = f"{label}, {length_label(int(cell['seq_len']))}: {part_text(part.label, ms, cell)}"
        sheet.spots.append(Spot(sheet.axes, ends, (bottom, bottom + share), text))
        bottom += share
