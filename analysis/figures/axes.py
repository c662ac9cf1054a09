"""What every figure against length or ranks ends with: axis, failures, and a sentence where it is empty."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import NullFormatter

from analysis.cells.cells import Cells
from analysis.figures.failures import MAX_LANE, Mark, count_failures, draw_failures, length_marks
from analysis.figures.style import LENGTH, MUTED_COLOR, Scale, style_x_axis, width_inches

REMARK_LETTERS_PER_INCH, SENTENCE_LETTERS_PER_INCH = 11.5, 7.5
BELOW_LANE = (1 - MAX_LANE) / 2
"""Where a sentence stands clear of failures, however many there are."""
LOG_FROM_RATIO = 20
"""A y axis is logarithmic when its largest value is this many times the smallest."""


def finish_length_axes(axes: Axes, cells: Cells, *, column: str, noun: str) -> None:
    """The length axis, the failures and, where no cell has a value in `column`, a sentence that says so."""
    finish_axes(axes, cells, length_marks(cells), column=column, noun=noun, scale=LENGTH)


def finish_axes(
    axes: Axes, cells: Cells, marks: Sequence[Mark], *, column: str, noun: str, scale: Scale
) -> None:
    """The same against anything that has a scale."""
    style_x_axis(axes, scale, scale.values(cells.frame))
    axes.grid(visible=True, color="#E0E0E0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if cells.frame[column].isna().all():
        say_empty(axes, cells, noun, BELOW_LANE)
    draw_failures(axes, marks)


def write_remarks(axes: Axes, remarks: Sequence[str]) -> None:
    """What a reader must know of this figure's cells, above its axes and no wider than the figure."""
    text = textwrap.fill("; ".join(remarks), int(REMARK_LETTERS_PER_INCH * width_inches(axes)))
    axes.set_title(text, loc="left", size=8, color=MUTED_COLOR)


def say_empty(axes: Axes, cells: Cells, noun: str, y: float) -> None:
    """Where there is nothing to draw, why; `y` in axes fractions."""
    failures = count_failures(cells)
    why = f" ({failures})" if failures else ""
    article = "an" if noun.startswith(tuple("aeiou")) else "a"
    text = f"No cell has {article} {noun}{why}" if len(cells) else "No records"
    text = textwrap.fill(text, int(SENTENCE_LETTERS_PER_INCH * width_inches(axes)))
    axes.text(0.5, y, text, transform=axes.transAxes, ha="center", va="center", color=MUTED_COLOR)
    axes.set_yticks([])
    axes.set_ylim(0, 1)


def scale_y(
    axes: Axes, values: pd.Series[float], *, is_linear: bool = False, log_from: float = LOG_FROM_RATIO
) -> None:
    """From zero on a linear axis; logarithmic where the values span more than a linear one can show."""
    low, high = values.min(), values.max()
    if not is_linear and low > 0 and high / low > log_from:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(
            NullFormatter()
        )  # it knows no sizes, and names powers of ten between them
    else:
        axes.set_ylim(bottom=0)
        if high > 0 and math.isfinite(high):
            axes.set_ylim(top=max(axes.get_ylim()[1], high * 1.08))
