"""Where a traced step went: bars of a whole step against length, and a waterfall per cell."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from analysis.figures.style import MUTED_COLOR, line_of, of_step
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
VOID_REASON = (
    f"the traced step took over {MAX_TRACED_TO_TIMED} or under {MIN_TRACED_TO_TIMED} times the timed step"
)
VOID = "void: no trace that describes it"
SPLIT = "part_attention_ms"
"""The column that has a value wherever a step is split."""
WATERFALL_NOUN = "split of its step"


def plot_step_parts(cells: Cells, axes: Axes) -> None:
    """The whole traced step of every cell as one bar, each part a share of it."""
    lengths = sorted({int(length) for length in cells.frame["seq_len"]})
    drawn = [each for each in cells.series if each.rows[SPLIT].notna().any()]
    axes.set_ylim(2 * MARKER_Y, 1)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 1])
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    left, remarks = MAX_BARS, _void_remarks(cells)
    for number, each in enumerate(drawn):
        left -= _draw_bars(axes, each, number, len(drawn), lengths, most=left)
    if left == 0:
        remarks.append(f"only the first {MAX_BARS} cells")
    write_remarks(axes, remarks)
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
        say_empty(axes, without, WATERFALL_NOUN)
        write_remarks(axes, _void_remarks(cells))
        axes.set_xticks([])
        _write_failures(axes, without)
        return
    rows = list(_waterfall_rows(cells))
    split = cells.frame[cells.frame[SPLIT].notna()]
    whole = len(split) - int((split[EFFICIENCY] >= 0).sum())
    if whole:
        text = f"no ideal attention for {count_label(whole, 'cell')}: local did not run, or was no faster"
        axes.set_title(text, loc="left", size=8, color=MUTED_COLOR)
    for y, row in enumerate(rows):
        for start, share, style in row.bars:
            bar = axes.barh(y, share, left=start, height=0.72, color=style.color, label=style.label)
            if row.text_at_bar:
                axes.annotate(
                    row.text_at_bar, (max(start, start + share), y), xytext=(4, 0),
                    textcoords="offset points", va="center", fontsize=8, color=MUTED_COLOR,
                )  # fmt: skip
            bar.set_label(style.label)
        if not row.bars:
            axes.text(0.01, y, row.text_at_bar, va="center", fontsize=8, color=MUTED_COLOR)
    axes.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    end = max(1.0, *(start + share for row in rows for start, share, _ in row.bars))
    has_text = any(row.bars and row.text_at_bar for row in rows)
    axes.set_xlim(0, end * TEXT_ROOM if has_text else end)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1))
    axes.set_xlabel(of_step("share of the traced step", cells))
    axes.grid(visible=True, axis="x", color="#E0E0E0", linewidth=0.6)
    axes.set_axisbelow(True)


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


def _waterfall_rows(cells: Cells) -> Iterator[_Row]:
    for cell, who in zip(cells.rows[:MAX_ROWS], cells.names, strict=False):
        name = f"{who}, {length_label(int(cell['seq_len']))}"
        if pd.isna(cell[SPLIT]):
            yield _Row(name, (), status_label(shown_status(cell)) if cell["status"] != "ok" else VOID)
            continue
        bars = _bars(cell)
        if len(cells) > FEW_CELLS:
            yield _Row(f"{name}, {number_label(step_ms(cell))} ms", bars, "")
            continue
        yield _Row(f"{name}: {number_label(step_ms(cell))} ms", (), "")
        for bar in bars:
            ms = bar[1] * step_ms(cell)
            yield _Row(bar[2].label, (bar,), f"{number_label(ms)} ms, {percent_label(bar[1])}")
    if len(cells) > MAX_ROWS:
        yield _Row("", (), f"{more_label(len(cells) - MAX_ROWS, 'cell')} in summary.csv")


def _bars(cell: Mapping[Any, Any]) -> tuple[tuple[float, float, PartStyle], ...]:
    """(Start, share, style) of every part, each beginning where the one before ends."""
    parts, whole_ms = waterfall_of(cell), step_ms(cell)
    shares = [part_ms / whole_ms for _, part_ms in parts]
    starts = accumulate(shares, initial=0.0)
    return tuple(zip(starts, shares, (style for style, _ in parts), strict=False))


def _draw_bars(
    axes: Axes, each: Series, number: int, count: int, lengths: Sequence[int], *, most: int
) -> int:
    """The bars of one series, with its marker below each; how many there are."""
    octaves = min([log2(longer / shorter) for shorter, longer in pairwise(lengths)], default=1.0)
    step = min(octaves, 1.0) * BAR_ROOM / count
    style, rows = each.style, each.rows[each.rows[SPLIT].notna()].head(most)
    look = line_of(each.variant_number) | {"linestyle": "none"}
    middle = 2 ** ((number - (count - 1) / 2) * step)
    for _, cell in rows.iterrows():
        x, bottom = float(cell["seq_len"]) * middle, 0.0
        left, right = x * 2 ** (-step * 0.45), x * 2 ** (step * 0.45)
        for part, ms in parts_of(cell, WHOLE_STEP):
            share = ms / step_ms(cell)
            axes.bar(left, share, right - left, bottom, align="edge", color=part.color, label=part.label)
            bottom += share
    axes.plot(
        rows["seq_len"] * middle, [MARKER_Y] * len(rows),
        color=style.color, marker=style.marker, markersize=5, label=each.label, **look,
    )  # fmt: skip
    return len(rows)


def _write_failures(axes: Axes, cells: Cells) -> None:
    """The statuses of cells that have no bar, where no other has one either."""
    failed = cells.frame[cells.frame["status"] != "ok"]
    statuses = dict.fromkeys(map(status_label, shown_statuses(failed)))
    for number, status in enumerate(statuses):
        axes.text(0.5, 0.25 - 0.1 * number, status, transform=axes.transAxes, ha="center", fontsize=8)
