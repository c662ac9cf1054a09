"""Style shared by all figures: fonts, lines, colours, and the axes."""

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
    FuncFormatter,
    MaxNLocator,
    NullFormatter,
    NullLocator,
    PercentFormatter,
)

from analysis.labels import bytes_label
from bench.common.labels import SIZES, length_label
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
"""Settings of matplotlib. SVG files keep text as text: they are small and can be searched and read aloud."""
VARIANT_FILLS = ("full", "none", "left", "bottom", "right", "top")
BANNER_COLOR = "#A63603"
MUTED_COLOR = "#595959"
REFERENCE: Mapping[str, Any] = {"color": MUTED_COLOR, "linewidth": 1.1, "zorder": 1.5}
"""Style of a line across the axes that is no series, such as a capacity or an ideal."""
MAX_TICKS = 6
PERCENT = PercentFormatter(xmax=1, symbol=" %")
TICK_GAP = 0.13
"""Smallest distance of two tick labels, as a fraction of the width of the axes."""
EDGE_OCTAVES = 0.35
"""Margin of a logarithmic x axis on either side of the values, in powers of two."""
LOG_FROM_RATIO = 20
"""Ratio of the largest to the smallest value from which a y axis is logarithmic."""


def plot_options(style: PlotStyle, variant_number: int) -> dict[str, Any]:
    """Return the keyword arguments with which matplotlib plots a series.

    Colour, marker and line are those of the strategy. The fill of the markers distinguishes its variants.
    """
    fill = VARIANT_FILLS[variant_number % len(VARIANT_FILLS)]
    return {"color": style.color, "marker": style.marker, "linestyle": style.line, "fillstyle": fill}


def dodge(number: int, count: int, values: Sequence[float]) -> float:
    """Return the factor that shifts one of `count` series along a logarithmic x axis.

    Points of several series at one x value then do not hide each other. All series together take at most a
    third of the smallest distance between two x values.

    Args:
        number: Number of the series, from 0.
        count: Number of all series.
        values: Ascending x values.
    """
    gaps = [math.log2(longer / shorter) for shorter, longer in pairwise(values)]
    shift = min(min([*gaps, 1.0]) / 3 / max(count, 1), 0.05)
    return float(2 ** ((number - (count - 1) / 2) * shift))


@dataclass(frozen=True, slots=True)
class XScale:
    """A logarithmic x axis: the column of integers that it shows, its title and the labels of its ticks."""

    column: str
    title: str
    label: Callable[[int], str]

    def values(self, rows: pd.DataFrame) -> list[int]:
        """Return the distinct known values of `column` in these rows, in ascending order."""
        return sorted({int(value) for value in rows[self.column].dropna()})


LENGTH = XScale("seq_len", "sequence length (tokens; 1k = 1024)", length_label)
RANKS = XScale("cluster.world_size", "ranks", str)


def style_x_axis(axes: Axes, scale: XScale, values: Sequence[int]) -> None:
    """Make the x axis logarithmic, with a tick such as `8k` at every value that has room for a label."""
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
    """Return both limits of a logarithmic x axis, with a margin beyond the values."""
    margin = 2 ** (EDGE_OCTAVES if len(values) > 1 else 1.0)
    return min(values) / margin, max(values) * margin


def scale_y(axes: Axes, values: pd.Series[float], log_from: float = LOG_FROM_RATIO) -> None:
    """Start the y axis at zero, or make it logarithmic if the values span a ratio of more than `log_from`."""
    low, high = values.min(), values.max()
    if low > 0 and high / low > log_from:
        axes.set_yscale("log")
        axes.yaxis.set_minor_formatter(NullFormatter())
    else:
        top = high * 1.08 if high > 0 and math.isfinite(high) else 1.0
        linear_y(axes, 0, max(axes.get_ylim()[1], top))


def linear_y(axes: Axes, bottom: float, top: float) -> None:
    """Set both limits of a linear y axis, with at most MAX_TICKS intervals between ticks."""
    axes.set_ylim(bottom, top)
    axes.yaxis.set_major_locator(MaxNLocator(MAX_TICKS))


def set_byte_ticks(axes: Axes) -> None:
    """Set ticks of a y axis in bytes: powers of two if logarithmic, else round numbers of one unit."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
        axes.set_yticks([2.0**power for power in powers[:: math.ceil(len(powers) / MAX_TICKS) or 1]])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_label(value)))
        return
    name, unit = next(((name, size) for name, size in SIZES.items() if size <= high), ("B", 1))
    ticks = MaxNLocator(MAX_TICKS, steps=[1, 2, 2.5, 5, 10]).tick_values(0, high / unit)
    axes.set_yticks([float(tick * unit) for tick in ticks if tick * unit <= high])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g} {name}"))
