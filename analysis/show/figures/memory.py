"""The figure of peak memory against length. Dashed lines show how much memory a rank may use."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from analysis.cells.capacity import Capacity, capacities_of, near_capacities
from analysis.cells.cells import Cells
from analysis.labels import bytes_label, count_label
from analysis.show.figures.quantity import Quantity, draw_series
from analysis.show.figures.sheet import Sheet
from analysis.show.figures.style import MAX_TICKS, REFERENCE, scale_y
from bench.common.labels import SIZES

PEAK_MEMORY = Quantity("peak_allocated_bytes", band="predicted_peak_allocated{}_bytes")
LINES = ("--", ":", "-.")
CPU_REMARK = "On a CPU a limit counts what tensors take, to within some MiB"


def draw_peak_memory(cells: Cells, sheet: Sheet) -> None:
    """Peak allocated memory of the worst rank, and dashed what a rank may use."""
    drawn = near_capacities(cells.frame, len(LINES))
    draw_series(sheet, cells, PEAK_MEMORY)
    sizes = [cells.frame[PEAK_MEMORY.column], pd.Series([each.size_bytes for each in drawn], dtype="float64")]
    scale_y(sheet.axes, pd.concat(sizes))
    for each, line in zip(drawn, LINES, strict=False):
        sheet.axes.axhline(each.size_bytes, label=f"may use: {each.label}", linestyle=line, **REFERENCE)
    _label_sizes(sheet.axes)
    sheet.remarks.extend(_remarks(cells, drawn))


def _remarks(cells: Cells, drawn: Sequence[Capacity]) -> list[str]:
    """Which capacities have no line, and what a limit counts."""
    others = [each.label for each in capacities_of(cells.frame) if each not in drawn]
    many = f"{count_label(len(others), 'other capacity', 'other capacities')} in summary.csv"
    above = f"Not drawn, far above the axis: {''.join(others)}"
    is_above = len(others) == 1 and len(drawn) < len(LINES)
    told = [above if is_above else many] if others else []
    is_limited = cells.is_cpu and any(each.label.startswith("limit") for each in drawn)
    return [*told, CPU_REMARK] if is_limited else told


def _label_sizes(axes: Axes) -> None:
    """Ticks of a y axis of bytes: powers of two, or on a linear one round numbers of one unit."""
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
