"""Lines across a figure of memory: what one rank may use."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from matplotlib.axes import Axes

from analysis.cells.capacity import capacity_label
from analysis.cells.cells import Cells
from analysis.figures.failures import height_inches
from analysis.figures.style import MUTED_COLOR
from analysis.labels import count_label

MAX_LINES = 3
FAR_ABOVE = 8
"""A capacity this many times the highest peak is told in words unless a cell ran out of it."""
HEAD_ROOM = 0.08
"""The part of the axes above the highest line in which its label stands."""
LABEL_INCHES = 0.14
LABEL_X = 0.01
LINE_STYLE = (0, (6, 3))
CPU_REMARK = "on a CPU a limit counts what tensors take, to within some MiB"


@dataclass(frozen=True, slots=True)
class Capacity:
    """One distinct capacity of some cells, in words."""

    size_bytes: float
    label: str


def capacities_of(cells: Cells) -> list[Capacity]:
    """The distinct capacities of these cells, ascending."""
    known = cells.frame[cells.frame["capacity_bytes"].notna()].drop_duplicates(
        ["capacity_bytes", "capacity_source"]
    )
    found = {Capacity(cell["capacity_bytes"], capacity_label(cell)) for cell in cells.rows_of(known)}
    return sorted(found, key=lambda each: (each.size_bytes, each.label))


def drawn_capacities(cells: Cells) -> list[Capacity]:
    """Those near enough to the peaks, or run out of, to be lines: the lowest, where they are many."""
    reach_bytes = cells.frame["peak_allocated_bytes"].max() * FAR_ABOVE
    met = {*cells.frame.loc[cells.frame["status"] == "out_of_memory", "capacity_bytes"].dropna()}
    if math.isnan(reach_bytes):
        return []
    near = [each for each in capacities_of(cells) if each.size_bytes <= reach_bytes or each.size_bytes in met]
    return near[:MAX_LINES]


def capacity_remarks(cells: Cells, drawn: Sequence[Capacity]) -> list[str]:
    """What a reader must know: what the lines are, which capacities have none, what a limit counts."""
    remarks = ["dashed lines: the memory one rank may use"] if drawn else []
    others = [each.label for each in capacities_of(cells) if each not in drawn]
    if len(others) == 1:
        remarks.append(f"above the axis: the memory one rank may use, {others[0]}")
    elif others:
        remarks.append(f"{count_label(len(others), 'other capacity', 'other capacities')} in summary.csv")
    limited = cells.is_cpu and any(each.label.startswith("limit") for each in drawn)
    return [*remarks, CPU_REMARK] if limited else remarks


def make_room_above(axes: Axes, drawn: Sequence[Capacity]) -> None:
    """Raise the upper limit so that the highest label stands inside the axes."""
    if not drawn:
        return
    (bottom, top), highest = axes.get_ylim(), drawn[-1].size_bytes
    room = 1 / (1 - HEAD_ROOM)
    is_log = axes.get_yscale() == "log"
    needed = bottom * (highest / bottom) ** room if is_log else bottom + (highest - bottom) * room
    axes.set_ylim(bottom, max(top, needed))


def draw_capacities(axes: Axes, drawn: Sequence[Capacity]) -> None:
    """Each capacity as a dashed line with its label on it; call it when the limits of y are final.

    Lines too close for a label between them share one on the highest.
    """
    height = LABEL_INCHES / height_inches(axes)
    labels: list[str] = []
    for each, above in zip_longest(drawn, drawn[1:]):
        axes.axhline(each.size_bytes, color=MUTED_COLOR, linestyle=LINE_STYLE, linewidth=1.1, zorder=1.5)
        labels.append(each.label)
        if above and _fraction(axes, above.size_bytes) - _fraction(axes, each.size_bytes) < height:
            continue
        axes.annotate(
            ", ".join(labels), (LABEL_X, each.size_bytes), xycoords=axes.get_yaxis_transform(),
            xytext=(0, 2), textcoords="offset points", va="bottom", fontsize=8, color=MUTED_COLOR,
        )  # fmt: skip
        labels = []


def _fraction(axes: Axes, size_bytes: float) -> float:
    """Where on the y axis this size stands, 0..1."""
    x = axes.get_xlim()[0]
    return float(axes.transAxes.inverted().transform(axes.transData.transform((x, size_bytes)))[1])
