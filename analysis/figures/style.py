"""How figures look: their lines, their x axis, the colours of what is said around them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from analysis.cells.cells import Cells
from bench.labels import length_label

VARIANT_LINES = ("-", "--", ":", "-.")
VARIANT_FILLS = ("full", "none", "left", "bottom", "right", "top")
BANNER_COLOR = "#A63603"
MUTED_COLOR = "#595959"
MAX_TICKS = 10
NARROW_TICK_GAP = 0.135
"""Labels on a narrow figure stand at least so far apart, as a fraction of its axes."""
EDGE_OCTAVES = 0.35


NARROW_BELOW_INCHES = 4.5
"""A figure under this is drawn for narrow screens: names stand above what they name, not beside it."""


def is_narrow(axes: Axes) -> bool:
    """Whether the figure of these axes is drawn for narrow screens."""
    return width_inches(axes) < NARROW_BELOW_INCHES


def width_inches(axes: Axes) -> float:
    """How wide the figure of these axes is, in inches."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    return float(figure.get_size_inches()[0])


def line_of(variant_number: int) -> dict[str, Any]:
    """Line style and marker filling that tell the variants of one strategy apart."""
    return {
        "linestyle": VARIANT_LINES[variant_number % len(VARIANT_LINES)],
        "fillstyle": VARIANT_FILLS[variant_number % len(VARIANT_FILLS)],
    }


def dodge(number: int, count: int, lengths: Sequence[float]) -> float:
    """The factor that moves series `number` of `count` aside so that equal values stay apart.

    All series of a length keep to a third of the gap to the next length.
    """
    steps = [math.log2(longer / shorter) for shorter, longer in pairwise(lengths)]
    room = min([*steps, 1.0]) / 3
    step = min(room / max(count, 1), 0.05)
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


def of_step(text: str, cells: Cells) -> str:
    """A text on traced steps as it is true of these cells: of a prediction no step was traced."""
    return text.replace("traced step", "expected step") if cells.is_all_predicted else text


def style_x_axis(axes: Axes, scale: Scale, values: Sequence[int]) -> None:
    """A logarithmic x axis with a tick such as `8k` at each value, thinned where they are many."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel(scale.title, size=9 if is_narrow(axes) else None)
    if values:
        every = math.ceil(len(values) / MAX_TICKS)
        shown = sorted(values, reverse=True)[::every]
        if is_narrow(axes):
            shown = _apart(shown, x_limits(values))
        axes.xaxis.set_major_locator(FixedLocator(shown))
        axes.xaxis.set_major_formatter(FixedFormatter([scale.label(value) for value in shown]))
        axes.set_xlim(*x_limits(values))
    else:
        axes.set_xticks([])
    axes.xaxis.set_minor_locator(NullLocator())


def _apart(values: Sequence[int], limits: tuple[float, float]) -> list[int]:
    """The first of these values, and of the others those far enough from the one before."""
    left, right = limits
    found = [*values[:1]]
    for value in values:
        if math.log(found[-1] / value) / math.log(right / left) >= NARROW_TICK_GAP:
            found.append(value)
    return found


def x_limits(values: Sequence[int]) -> tuple[float, float]:
    """Both ends of the x axis: a little beyond the values, of which there may be none."""
    if not values:
        return 1.0, 2.0
    margin = 2 ** (EDGE_OCTAVES if len(values) > 1 else 1.0)
    return min(values) / margin, max(values) * margin
