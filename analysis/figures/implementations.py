"""Which implementation: what a call of each takes, holds and sends, beside one another."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from analysis.cells.cells import CPU_BANNER
from analysis.figures.sheet import Heading, Sheet, drawn, new_sheet, write_files
from bench.labels import MIB, length_label

ROW_INCHES = 0.19
MARKERS = "osD^v<>ph*"
COLOURS = ("#1B6CA8", "#D95F02", "#4D9221", "#7B3294", "#8C510A", "#5E3C99", "#01665E", "#C51B7D")
"""Of lengths; colour and marker tell the same."""
QUANTITIES: Mapping[str, tuple[str, float]] = {
    "call_ms": ("ms, forward and backward", 1.0),
    "peak_bytes": ("peak beyond inputs, MiB", MIB),
    "sent_bytes": ("most sent by a rank, MiB", MIB),
}
"""The panels: title, and what a stored value is divided by."""
WIDE = 200
"""An axis that spans more has ticks at powers of ten only."""
NOTE = "filled: ours, hollow: a package as shipped"


def write_implementations(rows: Sequence[Mapping[str, Any]], on_cpu: bool, folder: Path) -> list[Path]:
    """A figure for each number of ranks and of heads, as PNG and SVG; the paths without their endings."""
    paths = []
    group = itemgetter("ranks", "num_heads", "num_kv_heads")
    for (ranks, heads, kv_heads), its in groupby(sorted(rows, key=group), key=group):
        place, own = folder / f"implementations_{ranks}_ranks_{heads}_{kv_heads}_heads", [*its]
        subtitle = f"{ranks} ranks, {heads} query and {kv_heads} KV heads; {NOTE}"
        heading = Heading("One attention call", subtitle, CPU_BANNER if on_cpu else None)
        write_files(drawn(partial(_sheet, own, heading)), place)
        paths.append(place)
    return paths


def _sheet(rows: Sequence[Mapping[str, Any]], heading: Heading) -> Sheet:
    names = [*_families(rows)]
    sheet = new_sheet(heading, [ROW_INCHES * len(names)], columns=len(QUANTITIES))
    for axes, (column, (label, unit)) in zip(sheet.panels, QUANTITIES.items(), strict=True):
        for number, length in enumerate(sorted({row["seq_len"] for row in rows})):
            _draw(axes, names, [row for row in rows if row["seq_len"] == length], column, unit, number)
        _finish(axes, label)
        axes.set_yticks(range(len(names)), names if axes is sheet.panels[0] else [])
        axes.set_ylim(len(names) - 0.5, -0.5)
    return sheet


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
            label=length_label(row["seq_len"]),
        )  # fmt: skip


def _finish(axes: Axes, label: str) -> None:
    axes.set_xscale("log")
    axes.set_xlabel(label)
    low, high = axes.get_xlim()
    axes.set_xlim(low / 1.5, high * 1.5)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0,) if high / low > WIDE else (1.0, 2.0, 5.0)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
