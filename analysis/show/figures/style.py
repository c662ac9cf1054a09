"""How every figure looks: size, type, lines, and the axis of lengths or ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

from bench.common.labels import length_label
from bench.strategies.plot_style import PlotStyle

RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E0E0E0",
    "grid.linewidth": 0.6,
    "hatch.linewidth": 0.5,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 6,
    "svg.fonttype": "none",
}
"""Text of an SVG stays text: small files, which can be searched and read aloud."""
VARIANT_FILLS = ("full", "none", "left", "bottom", "right", "top")
BANNER_COLOR = "#A63603"
MUTED_COLOR = "#595959"
REFERENCE: Mapping[str, Any] = {"color": MUTED_COLOR, "linewidth": 1.1, "zorder": 1.5}
"""A line across the axes that is no series: a capacity, an ideal, zero."""
MAX_TICKS = 6
PERCENT = PercentFormatter(xmax=1, symbol=" %")
TICK_GAP = 0.13
"""Labels stand at least so far apart, as a fraction of the axes."""
EDGE_OCTAVES = 0.35
LOG_FROM_RATIO = 20
"""A y axis is logarithmic when its largest value is this many times the smallest."""


def look_of(style: PlotStyle, variant_number: int) -> dict[str, Any]:
    """How a series is drawn: by its strategy; how its marks are filled tells the variants of one apart."""
    fill = VARIANT_FILLS[variant_number % len(VARIANT_FILLS)]
    return {"color": style.color, "marker": style.marker, "linestyle": style.line, "fillstyle": fill}


def dodge(number: int, count: int, places: Sequence[float]) -> float:
    """The factor that moves series `number` of `count` aside so that equal values stay apart.

    All series of a length keep to a third of the gap to the next length.
    """
    steps = [math.log2(longer / shorter) for shorter, longer in pairwise(places)]
    step = min(min([*steps, 1.0]) / 3 / max(count, 1), 0.05)
    return float(2 ** ((number - (count - 1) / 2) * step))


@dataclass(frozen=True, slots=True)
class Scale:
    """What a logarithmic x axis shows: a column of whole numbers, named, and how one of them is written."""

    column: str
    title: str
    label: Callable[[int], str]

    def values(self, rows: pd.DataFrame) -> list[int]:
        """The different values of these cells, ascending."""
        return sorted({int(value) for value in rows[self.column].dropna()})


LENGTH = Scale("seq_len", "sequence length (tokens; 1k = 1024)", length_label)
RANKS = Scale("cluster.world_size", "ranks", str)


def style_x_axis(axes: Axes, scale: Scale, values: Sequence[int]) -> None:
    """A logarithmic x axis with a tick such as `8k` at each value, fewer where they are close."""
    left, right = x_limits(values)
    shown = [*values[-1:]]
    for value in reversed(values):
        if math.log(shown[-1] / value) / math.log(right / left) >= TICK_GAP:
            shown.append(value)
    axes.set_xscale("log", base=2)
    axes.set_xlim(left, right)
    axes.set_xlabel(scale.title)
    axes.xaxis.set_major_locator(FixedLocator(shown))
    axes.xaxis.set_major_formatter(FixedFormatter([scale.label(value) for value in shown]))
    axes.xaxis.set_minor_locator(NullLocator())


def x_limits(values: Sequence[int]) -> tuple[float, float]:
    """Both ends of the x axis: a little beyond the values."""
    margin = 2 ** (EDGE_OCTAVES if len(values) > 1 else 1.0)
    return min(values) / margin, max(values) * margin


def scale_y(axes: Axes, values: pd.Series[float], log_from: float = LOG_FROM_RATIO) -> None:
    """From zero on a linear axis; logarithmic where the values span more than a linear one can show."""
    low, high = values.min(), values.max()
    if low > 0 and high / low > log_from:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        top = high * 1.08 if high > 0 and math.isfinite(high) else 1.0
        linear_y(axes, 0, max(axes.get_ylim()[1], top))


def linear_y(axes: Axes, bottom: float, top: float) -> None:
    """A y axis with so many ticks whatever its height, on which the room for their labels depends."""
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(MaxNLocator(MAX_TICKS))
