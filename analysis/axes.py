"""What every figure against length ends with: its axis, its failures, and a sentence where it is empty."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes

from analysis.failures import count_failures, draw_failures, failure_marks
from analysis.series import Series
from analysis.style import MUTED_COLOR, style_length_axis


def finish_length_axes(
    axes: Axes, summary: pd.DataFrame, series: Sequence[Series], *, column: str, noun: str
) -> None:
    """The length axis, the failures and, where no cell has a value in `column`, a sentence that says so."""
    style_length_axis(axes, sorted({int(length) for length in summary["seq_len"]}))
    axes.grid(visible=True, color="#E0E0E0", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if summary[column].isna().all():
        say_empty(axes, summary, noun)
    draw_failures(axes, failure_marks(series))


def say_empty(axes: Axes, summary: pd.DataFrame, noun: str) -> None:
    """Where there is nothing to draw, why."""
    failures = count_failures(summary)
    why = f" ({failures})" if failures else ""
    text = f"No cell has a {noun}{why}" if len(summary) else "No records"
    axes.text(0.5, 0.4, text, transform=axes.transAxes, ha="center", color=MUTED_COLOR)
    axes.set_yticks([])
    axes.set_ylim(0, 1)
