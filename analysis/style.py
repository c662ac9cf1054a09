"""How figures look: one colour and marker per strategy, the length axis, the lines above a figure."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FixedFormatter, FixedLocator, NullLocator

from analysis.labels import count_label
from bench.words import NOT_USED, length_label


@dataclass(frozen=True, slots=True)
class Look:
    """A strategy's colour and marker, the same in every figure."""

    color: str
    marker: str


# Okabe and Ito's colours, which colour-blind readers can tell apart; grey for their too pale yellow.
STRATEGY_LOOKS: Mapping[str, Look] = {
    "local": Look("#000000", "o"),
    "ulysses": Look("#0072B2", "s"),
    "ring": Look("#D55E00", "^"),
    "usp": Look("#009E73", "D"),
    "deepspeed_ulysses": Look("#56B4E9", "v"),
    "ring_flash_attn": Look("#E69F00", "P"),
    "ring_flash_attn_llama3": Look("#CC79A7", "p"),
    "torch_cp": Look("#7F7F7F", "h"),
}
# Tol's muted colours, apart from the ones above.
OTHER_COLORS = ("#882255", "#332288", "#999933", "#117733", "#AA4499", "#88CCEE")
OTHER_MARKERS = ("<", ">", "8", "d")
VARIANT_LINES = ("-", "--", ":", "-.")
VARIANT_FILLS = ("full", "none", "left", "bottom", "right", "top")
BANNER_COLOR = "#A63603"
MUTED_COLOR = "#595959"
MAX_TICKS = 10
EDGE_OCTAVES = 0.35

SUBTITLE_KEYS = ("provenance", "hardware", "device_name", "model", "engine", "dtype", "workload")
"""What a reader must know of all cells of a figure, in order."""


def looks_of(strategies: Iterable[str]) -> dict[str, Look]:
    """Each strategy's colour and marker, no two alike while there are colours left.

    One that is not in the table gets those its name leads to, whatever else is drawn; where two names lead
    to one colour, the later in the alphabet takes the next that is free.
    """
    names = sorted(set(strategies))
    looks = {name: STRATEGY_LOOKS[name] for name in names if name in STRATEGY_LOOKS}
    free = [*OTHER_COLORS]
    for name in (name for name in names if name not in STRATEGY_LOOKS):
        code = zlib.crc32(name.encode())
        wanted = code % len(OTHER_COLORS)
        turns = (OTHER_COLORS[(wanted + turn) % len(OTHER_COLORS)] for turn in range(len(OTHER_COLORS)))
        color = next(color for color in turns if color in free)
        free = [each for each in free if each != color] or [*OTHER_COLORS]
        looks[name] = Look(color, OTHER_MARKERS[code // len(OTHER_COLORS) % len(OTHER_MARKERS)])
    return looks


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

    def values(self, summary: pd.DataFrame) -> list[int]:
        """The different values of these cells, ascending."""
        met = summary[self.column].dropna() if self.column in summary.columns else ()
        return sorted({int(value) for value in met})


LENGTH = Scale("seq_len", "sequence length (tokens; 1k = 1024)", length_label)
RANKS = Scale("cluster.world_size", "ranks", str)


def style_x_axis(axes: Axes, scale: Scale, values: Sequence[int]) -> None:
    """A logarithmic x axis with a tick such as `8k` at each value, thinned where they are many."""
    axes.set_xscale("log", base=2)
    axes.set_xlabel(scale.title)
    if values:
        every = math.ceil(len(values) / MAX_TICKS)
        shown = sorted(values, reverse=True)[::every]
        axes.xaxis.set_major_locator(FixedLocator(shown))
        axes.xaxis.set_major_formatter(FixedFormatter([scale.label(value) for value in shown]))
        axes.set_xlim(*x_limits(values))
    else:
        axes.set_xticks([])
    axes.xaxis.set_minor_locator(NullLocator())


def x_limits(values: Sequence[int]) -> tuple[float, float]:
    """Both ends of the x axis: a little beyond the values, of which there may be none."""
    if not values:
        return 1.0, 2.0
    margin = 2 ** (EDGE_OCTAVES if len(values) > 1 else 1.0)
    return min(values) / margin, max(values) * margin


def subtitle(summary: pd.DataFrame) -> str:
    """Provenance, hardware, model, engine, dtype and ranks of all cells: `measured, cpu, ..., 2 ranks`."""
    parts = []
    for key in SUBTITLE_KEYS:
        met = [*summary[key].dropna().unique()] if key in summary.columns else []
        values = sorted(value for value in met if value != NOT_USED)
        parts += [" and ".join(map(str, values))] if values else []
    return ", ".join([*parts, *_ranks(summary)])


def _ranks(summary: pd.DataFrame) -> list[str]:
    key = "cluster.world_size"
    ranks = summary[key].dropna() if key in summary.columns else pd.Series(dtype="float64")
    if ranks.empty:
        return []
    low, high = int(ranks.min()), int(ranks.max())
    return [count_label(high, "rank") if low == high else f"{low} to {high} ranks"]
