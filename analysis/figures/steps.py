"""Where a traced step went: bars of a whole step against length, and a waterfall per cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import log2
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from analysis.cells.cells import Cells
from analysis.cells.series import Series
from analysis.cells.statuses import shown_status, shown_statuses
from analysis.figures.axes import finish_length_axes, say_empty, write_remarks
from analysis.figures.failures import with_void
from analysis.figures.quantity import Area
from analysis.figures.style import MUTED_COLOR, is_narrow, line_of, of_step
from analysis.figures.waterfall import WHOLE_STEP, PartStyle, parts_of, step_ms, waterfall_of
from analysis.labels import count_label, more_label, number_label, percent_label, status_label
from analysis.metrics.step_parts import EFFICIENCY
from analysis.metrics.traced_shares import MAX_TRACED_TO_TIMED, MIN_TRACED_TO_TIMED, is_void
from bench.labels import length_label

FEW_CELLS = 4
"""Up to so many cells a waterfall gives every part a line of its own."""
MAX_ROWS = 60
MAX_BARS = 120
"""More bars than these nobody can tell apart, and each takes the time of a hundred points."""
ROW_INCHES = 0.26
BAR_ROOM = 0.6
"""The part of the gap between two lengths that their bars may fill."""
MARKER_Y = -0.045
TEXT_ROOM = 1.25
"""How far a waterfall's axis reaches where texts stand beside its bars; its ticks end with the data."""
MIN_SHARE_POINTED_AT = 0.002
"""A part that took less of its step is too thin to be pointed at."""
VOID_REASON = (
    f"the traced step took over {MAX_TRACED_TO_TIMED} or under {MIN_TRACED_TO_TIMED} times the timed step"
)
VOID = "void: no trace that describes it"
SPLIT = "part_attention_ms"
"""The column that has a value wherever a step is split."""
WATERFALL_NOUN = "split of its step"


def plot_step_parts(cells: Cells, axes: Axes) -> None:
    """The whole traced step of every cell as one bar, each part a share of it."""
    axes.set_ylim(2 * MARKER_Y, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    for bar in _step_bars(cells):
        axes.bar(
            bar.left, bar.top - bar.bottom, bar.right - bar.left, bar.bottom, align="edge",
            color=bar.part.color, label=bar.part.label,
        )  # fmt: skip
    for each, rows, middle, _ in _shown_series(cells):
        axes.plot(
            rows["seq_len"] * middle, [MARKER_Y] * len(rows),
            color=each.style.color, marker=each.style.marker, markersize=5, label=each.label,
            **(line_of(each.variant_number) | {"linestyle": "none"}),
        )  # fmt: skip
    is_cut = cells.frame[SPLIT].notna().sum() > MAX_BARS
    remarks = [f"only the first {MAX_BARS} cells"] if is_cut else []
    write_remarks(axes, _void_remarks(cells) + remarks)
    finish_length_axes(axes, with_void(cells, SPLIT), column=SPLIT, noun=WATERFALL_NOUN)
    axes.grid(visible=False, axis="x")


def _void_remarks(cells: Cells) -> list[str]:
    void = sum(map(is_void, cells.frame["traced_to_timed"].dropna()))
    return [f"{count_label(void, 'void cell')}: {VOID_REASON}"] if void else []


def plot_waterfall(cells: Cells, axes: Axes) -> None:
    """From ideal attention to the whole traced step, in shares of it; the best cells first where many."""
    axes.spines[["top", "right"]].set_visible(False)
    if cells.frame[SPLIT].isna().all():
        without = with_void(cells, SPLIT)
        say_empty(axes, without, WATERFALL_NOUN, y=0.4)
        write_remarks(axes, _void_remarks(cells))
        axes.set_xticks([])
        _write_failures(axes, without)
        return
    rows = list(_waterfall_rows(cells))
    split = cells.frame[cells.frame[SPLIT].notna()]
    whole = len(split) - int((split[EFFICIENCY] >= 0).sum())
    if whole:
        text = f"no ideal attention for {count_label(whole, 'cell')}: local did not run, or was no faster"
        write_remarks(axes, [text])
    narrow = is_narrow(axes)
    for y, row in enumerate(rows):
        _draw_row(axes, row, y, narrow=narrow)
    axes.set_yticks(*(([], []) if narrow else (range(len(rows)), [row.label for row in rows])), fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    end = max(1.0, *(start + share for row in rows for start, share, _ in row.bars))
    has_text = not narrow and any(row.bars and row.text_at_bar for row in rows)
    axes.set_xlim(0, end * TEXT_ROOM if has_text else end)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_xlabel(of_step("share of the traced step", cells))
    axes.grid(visible=True, axis="x", color="#E0E0E0", linewidth=0.6)
    axes.set_axisbelow(True)


def _draw_row(axes: Axes, row: _Row, y: int, *, narrow: bool) -> None:
    """Bars with their text beside them, or on a narrow figure beneath the row's name and text."""
    begin, end = _bar_ends(y, narrow=narrow)
    for start, share, style in row.bars:
        axes.barh(
            (begin + end) / 2, share, left=start, height=end - begin, color=style.color, label=style.label
        )
        if row.text_at_bar and not narrow:
            axes.annotate(
                row.text_at_bar, (max(start, start + share), y), xytext=(4, 0),
                textcoords="offset points", va="center", fontsize=8, color=MUTED_COLOR,
            )  # fmt: skip
    if narrow and row.bars:
        what = ": ".join(filter(None, [row.label, row.text_at_bar]))
        axes.text(0.01, y - 0.25, what, va="center", fontsize=8)
    elif narrow:
        axes.text(0.01, y - 0.25, row.label, va="center", fontsize=8)
        axes.text(0.01, y + 0.2, row.text_at_bar, va="center", fontsize=8, color=MUTED_COLOR)
    elif not row.bars:
        axes.text(0.01, y, row.text_at_bar, va="center", fontsize=8, color=MUTED_COLOR)


def _bar_ends(y: int, *, narrow: bool) -> tuple[float, float]:
    """The top and the bottom of a row's bars; a narrow figure has text in the row's upper half."""
    return (y, y + 0.4) if narrow else (y - 0.36, y + 0.36)


def waterfall_areas(cells: Cells, *, narrow: bool = False) -> Iterator[Area]:
    """What can be pointed at in a waterfall: every part of every bar."""
    if cells.frame[SPLIT].isna().all():
        return
    for y, row in enumerate(_waterfall_rows(cells)):
        for start, share, part in row.bars:
            if share >= MIN_SHARE_POINTED_AT:
                text = (
                    f"{row.of}: {part.label} {number_label(share * row.step_ms)} ms, {percent_label(share)}"
                )
                yield Area((start, start + share), _bar_ends(y, narrow=narrow), text)


def step_part_areas(cells: Cells) -> Iterator[Area]:
    """What can be pointed at in the bars of whole steps: every part."""
    for bar in _step_bars(cells):
        if bar.top - bar.bottom >= MIN_SHARE_POINTED_AT:
            share = bar.top - bar.bottom
            ms = f"{number_label(share * bar.step_ms)} ms"
            text = f"{bar.name}: {bar.part.label} {ms}, {percent_label(share)}"
            yield Area((bar.left, bar.right), (bar.bottom, bar.top), text)


def has_ideal(cells: Cells) -> bool:
    """Whether any cell's attention is split into an ideal and the rest."""
    return bool((cells.frame[EFFICIENCY] >= 0).any())


def waterfall_inches(cells: Cells) -> float:
    """How high the axes have to be: a row per cell, or per part of a cell where those are few."""
    if cells.frame[SPLIT].isna().all():
        return 2.0
    return max(2.0, ROW_INCHES * (sum(1 for _ in _waterfall_rows(cells)) + 2))


@dataclass(frozen=True, slots=True)
class _Row:
    """One line of a waterfall: bars of (start, share, style), and what is written beside the last one."""

    label: str
    bars: tuple[tuple[float, float, PartStyle], ...]
    text_at_bar: str
    of: str = ""
    """The cell, with its length."""
    step_ms: float = 0.0
    """Its traced step."""


def _waterfall_rows(cells: Cells) -> Iterator[_Row]:
    for cell, who in zip(cells.rows[:MAX_ROWS], cells.names, strict=False):
        name = f"{who}, {length_label(int(cell['seq_len']))}"
        if pd.isna(cell[SPLIT]):
            yield _Row(name, (), status_label(shown_status(cell)) if cell["status"] != "ok" else VOID)
            continue
        bars = _bars(cell)
        if len(cells) > FEW_CELLS:
            yield _Row(f"{name}, {number_label(step_ms(cell))} ms", bars, "", name, step_ms(cell))
            continue
        yield _Row(f"{name}: {number_label(step_ms(cell))} ms", (), "")
        for bar in bars:
            ms = bar[1] * step_ms(cell)
            text = f"{number_label(ms)} ms, {percent_label(bar[1])}"
            yield _Row(bar[2].label, (bar,), text, name, step_ms(cell))
    if len(cells) > MAX_ROWS:
        yield _Row("", (), f"{more_label(len(cells) - MAX_ROWS, 'cell')} in summary.csv")


def _bars(cell: Mapping[Any, Any]) -> tuple[tuple[float, float, PartStyle], ...]:
    """(Start, share, style) of every part, each beginning where the one before ends."""
    parts, whole_ms = waterfall_of(cell), step_ms(cell)
    shares = [part_ms / whole_ms for _, part_ms in parts]
    starts = accumulate(shares, initial=0.0)
    return tuple(zip(starts, shares, (style for style, _ in parts), strict=False))


@dataclass(frozen=True, slots=True)
class _StepBar:
    """One part of a whole step against length, in the data of the axes."""

    left: float
    right: float
    bottom: float
    top: float
    part: PartStyle
    name: str
    step_ms: float


def _step_bars(cells: Cells) -> Iterator[_StepBar]:
    for each, rows, middle, step in _shown_series(cells):
        for cell in cells.rows_of(rows):
            x, bottom = float(cell["seq_len"]) * middle, 0.0
            left, right = x * 2 ** (-step * 0.45), x * 2 ** (step * 0.45)
            name, whole_ms = f"{each.label}, {length_label(int(cell['seq_len']))}", step_ms(cell)
            for part, ms in parts_of(cell, WHOLE_STEP):
                top = bottom + ms / whole_ms
                yield _StepBar(left, right, bottom, top, part, name, whole_ms)
                bottom = top


def _shown_series(cells: Cells) -> Iterator[tuple[Series, pd.DataFrame, float, float]]:
    """Each series with its first cells that have a split, MAX_BARS of all; and where its bars stand.

    That is the factor from a length to the middle of its bar, and the bar's room in octaves.
    """
    lengths = sorted({int(length) for length in cells.frame["seq_len"]})
    drawn = [each for each in cells.series if each.rows[SPLIT].notna().any()]
    octaves = min([log2(longer / shorter) for shorter, longer in pairwise(lengths)], default=1.0)
    step = min(octaves, 1.0) * BAR_ROOM / max(len(drawn), 1)
    left = MAX_BARS
    for number, each in enumerate(drawn):
        rows = each.rows[each.rows[SPLIT].notna()].head(left)
        left -= len(rows)
        yield each, rows, 2 ** ((number - (len(drawn) - 1) / 2) * step), step


def _write_failures(axes: Axes, cells: Cells) -> None:
    """The statuses of cells that have no bar, where no other has one either."""
    failed = cells.frame[cells.frame["status"] != "ok"]
    statuses = dict.fromkeys(map(status_label, shown_statuses(failed)))
    for number, status in enumerate(statuses):
        axes.text(0.5, 0.25 - 0.1 * number, status, transform=axes.transAxes, ha="center", fontsize=8)
