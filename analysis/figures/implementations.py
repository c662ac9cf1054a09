"""Which implementation: what a call of each takes, holds and sends, beside one another."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from analysis.figures.drawing import DPI, write_files
from analysis.figures.style import BANNER_COLOR, MUTED_COLOR
from bench.labels import MIB, length_label

WIDTH_INCHES = 10.5
ROW_INCHES = 0.24
OTHER_INCHES = 1.7
MARKERS = "osD^v<>ph*"
COLOURS = ("#1B6CA8", "#D95F02", "#4D9221", "#7B3294", "#8C510A", "#5E3C99", "#01665E", "#C51B7D")
"""Of lengths; colour and marker tell the same."""
QUANTITIES: Mapping[str, tuple[str, float]] = {
    "call_ms": ("ms, forward and backward", 1.0),
    "peak_bytes": ("peak beyond the inputs, MiB", MIB),
    "sent_bytes": ("sent by the rank that sends most, MiB", MIB),
}
"""The axes: title, and what a stored value is divided by."""
WIDE = 200
"""An axis that spans more has ticks at powers of ten only."""
EDGE, LEAST_SPAN = 1.15, 8
ON_A_CPU = "A CPU shows that the loop works, not which implementation is faster on GPUs"


def write_implementations(rows: Sequence[Mapping[str, Any]], on_cpu: bool, folder: Path) -> list[Path]:
    """A figure for each number of ranks and of heads, as PNG and SVG; the paths without their endings."""
    paths = []
    for (ranks, heads, kv_heads), its in groupby(sorted(rows, key=_group), key=_group):
        place = folder / f"implementations_{ranks}_ranks_{heads}_{kv_heads}_heads"
        title = f"One attention call on {ranks} ranks, {heads} query and {kv_heads} KV heads"
        write_files(_figure([*its], title, on_cpu=on_cpu), place)
        paths.append(place)
    return paths


def _group(row: Mapping[str, Any]) -> tuple[int, int, int]:
    return row["ranks"], row["num_heads"], row["num_kv_heads"]


def _figure(rows: Sequence[Mapping[str, Any]], title: str, *, on_cpu: bool) -> Figure:
    names = [*_families(rows)]
    height = OTHER_INCHES + ROW_INCHES * len(names)
    figure = Figure(figsize=(WIDTH_INCHES, height), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(f"{title}\n", x=0.01, ha="left", fontsize=13)
    panels = figure.subplots(1, len(QUANTITIES), sharey=True)
    lengths = sorted({row["seq_len"] for row in rows})
    for axes, (column, (label, unit)) in zip(panels, QUANTITIES.items(), strict=True):
        for number, length in enumerate(lengths):
            _draw(axes, names, [row for row in rows if row["seq_len"] == length], column, unit, number)
        _finish(axes, label)
    panels[0].set_yticks(range(len(names)), names, fontsize=8)
    panels[0].set_ylim(len(names) - 0.5, -0.5)
    drawn = {str(handle.get_label()): handle for handle in reversed(panels[0].get_lines())}
    labels = [length_label(length) for length in lengths if length_label(length) in drawn]
    handles = [drawn[label] for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9)
    note = "filled: ours, hollow: a package as shipped"
    said, colour = (f"{ON_A_CPU}; {note}", BANNER_COLOR) if on_cpu else (note, MUTED_COLOR)
    text = panels[0].text(0, 1.02, said, transform=panels[0].transAxes, color=colour, fontsize=9)
    text.set_in_layout(False)  # it is as wide as all panels
    return figure


def _families(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Names from the top: each of ours, and below it the packages that do the same."""
    names = [*dict.fromkeys(row["implementation"] for row in rows if row["reason"] is None)]
    counterpart = {row["implementation"]: row["counterpart"] for row in rows}
    is_ours = {row["implementation"]: row["package"] is None for row in rows}
    strategies = [*dict.fromkeys(name.split()[0] for name in names)]
    own = (name for name in names if is_ours[name])
    for ours in sorted(own, key=lambda name: strategies.index(name.split()[0])):
        yield ours
        yield from (name for name in names if counterpart[name] == ours and not is_ours[name])


def _draw(
    axes: Axes, names: Sequence[str], rows: Sequence[Mapping[str, Any]], column: str, unit: float, number: int
) -> None:
    """The points of one length."""
    marker, colour = MARKERS[number % len(MARKERS)], COLOURS[number % len(COLOURS)]
    for row in rows:
        value = row[column]
        if value is None or value == []:
            continue
        shown = statistics.median(value) if isinstance(value, list) else value / unit
        fill = colour if row["package"] is None else "white"
        axes.plot(
            [shown], [names.index(row["implementation"])], marker, color=colour, markerfacecolor=fill,
            markersize=6.5, label=length_label(row["seq_len"]),
        )  # fmt: skip


def _finish(axes: Axes, label: str) -> None:
    axes.set_xscale("log")
    axes.set_xlabel(label, fontsize=9)
    low, high = axes.get_xlim()
    is_wide = high / low > WIDE
    rest = max(1.0, LEAST_SPAN * low / high) ** 0.5
    axes.set_xlim(low / EDGE / rest, high * EDGE * rest)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if is_wide else (1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.tick_params(axis="x", labelsize=8)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="both", color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
