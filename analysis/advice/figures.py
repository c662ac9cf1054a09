"""Figures of advice: the map of leaders, and the longest length that fits. Imports matplotlib."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from matplotlib.axes import Axes

from analysis.advice.maps import LINKS, LONGEST, Leader, Reach
from analysis.cells.series import Style, styles_of
from analysis.figures.sheet import Heading, Sheet, drawn, new_sheet, write_files
from analysis.figures.style import LENGTH, MUTED_COLOR, style_x_axis
from bench.labels import KIB, length_label

PREDICTED = "Predicted: nothing ran"
MAP_TITLE = "Which strategy has most tokens/s, by length and link"
LEVEL = "hatched: no clear difference to those named"
REACH_TITLE = "Longest sequence that fits"
PERHAPS = "hatched: may fit or not"
NOTHING = Style("#F0F0F0", "", "")
HATCH = "////"
ROW_INCHES = 0.42
BAR_INCHES = 0.2
LEAST_LENGTH = KIB


def write_map(leaders: Sequence[Leader], subtitle: str, folder: Path) -> None:
    """`crossover.png` and `.svg`: length by link bandwidth, at the best degrees of each strategy."""
    heading = Heading(MAP_TITLE, subtitle, PREDICTED)
    write_files(drawn(lambda: _map(leaders, heading)), folder / "crossover")


def _map(leaders: Sequence[Leader], heading: Heading) -> Sheet:
    rows = {rate: row for row, (rate, _) in enumerate(LINKS)}
    lengths = sorted({each.seq_len for each in leaders})
    styles = styles_of({each.strategy for each in leaders if each.strategy is not None})
    sheet = new_sheet(heading, [ROW_INCHES * len(rows)])
    axes, named = sheet.axes, dict.fromkeys(each.strategy for each in leaders)
    for each in leaders:
        style = NOTHING if each.strategy is None else styles[each.strategy]
        column, row = lengths.index(each.seq_len), rows[each.bytes_per_s]
        _draw_field(axes, column, row, style, len(each.level) > 1)
        _write_in(axes, column, row, [name for name in each.level if name != each.strategy])
    for name in named:
        style = NOTHING if name is None else styles[name]
        axes.bar(0, 0, bottom=-1, color=style.color, label=name or "nothing fits")
    _hatched_label(axes, LEVEL)
    axes.set_xticks(range(len(lengths)), map(length_label, lengths))
    axes.set_yticks(range(len(LINKS)), [f"{name}\n{rate / 1e9:g} GB/s" for rate, name in LINKS], size=8)
    axes.set_xlabel(LENGTH.title)
    axes.set_xlim(-0.5, len(lengths) - 0.5)
    axes.set_ylim(-0.5, len(LINKS) - 0.5)
    axes.grid(visible=False)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return sheet


def _hatched_label(axes: Axes, label: str) -> None:
    axes.bar(0, 0, bottom=-9, color="white", edgecolor=MUTED_COLOR, hatch=HATCH, linewidth=0.5, label=label)


def _draw_field(axes: Axes, column: int, row: int, style: Style, is_open: bool) -> None:
    axes.bar(
        column, 0.96, width=0.97, bottom=row - 0.48, color=style.color, alpha=0.45 if is_open else 0.9,
        hatch=HATCH if is_open else None, edgecolor="white", linewidth=0,
    )  # fmt: skip


def _write_in(axes: Axes, column: int, row: int, others: Sequence[str]) -> None:
    if others:
        box = {"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1}
        axes.text(column, row, "\n".join(others), ha="center", va="center", size=7, bbox=box)


def write_reach(reaches: Iterable[Reach], seq_len: int, subtitle: str, folder: Path) -> None:
    """`longest.png` and `.svg`: tokens by strategy and sp_degree; a dotted line at the length asked about."""
    heading = Heading(REACH_TITLE, subtitle, PREDICTED)
    rows = sorted(reaches, key=lambda each: (each.cell.strategy, each.cell.layout, each.cell.sp_degree))
    write_files(drawn(lambda: _reach(rows, seq_len, heading)), folder / "longest")


def _reach(rows: Sequence[Reach], seq_len: int, heading: Heading) -> Sheet:
    styles = styles_of(each.cell.strategy for each in rows)
    sheet = new_sheet(heading, [BAR_INCHES * max(len(rows), 1)])
    axes = sheet.axes
    for place, each in enumerate(reversed(rows)):
        _bar(axes, place, each, styles[each.cell.strategy])
    if any(each.perhaps > each.surely for each in rows):
        _hatched_label(axes, PERHAPS)
    axes.axvline(seq_len, color=MUTED_COLOR, linestyle=":", linewidth=1, label="asked about")
    names = [f"{each.cell.strategy} sp {each.cell.sp_degree}" for each in reversed(rows)]
    axes.set_yticks(range(len(rows)), names)
    longest = max((each.perhaps for each in rows), default=0)
    ticks = [length for length in (4**power * KIB for power in range(9)) if length <= max(longest, seq_len)]
    style_x_axis(axes, LENGTH, ticks)
    axes.set_xlim(LEAST_LENGTH, max(longest, seq_len) * 2)
    axes.set_ylim(-0.6, max(len(rows), 1) - 0.4)
    axes.grid(visible=False, axis="y")
    return sheet


def _bar(axes: Axes, place: int, reach: Reach, style: Style) -> None:
    surely = max(reach.surely - LEAST_LENGTH, 0)
    axes.barh(place, surely, left=LEAST_LENGTH, height=0.72, color=style.color)
    if reach.perhaps > reach.surely:
        start = max(reach.surely, LEAST_LENGTH)
        axes.barh(
            place, reach.perhaps - start, left=start, height=0.72, color=style.color, alpha=0.35, hatch=HATCH,
            edgecolor="white", linewidth=0,
        )  # fmt: skip
    axes.annotate(
        _reach_label(reach), (max(reach.perhaps, LEAST_LENGTH), place), xytext=(4, 0),
        textcoords="offset points", va="center", size=8, color=MUTED_COLOR,
    )  # fmt: skip


def _reach_label(reach: Reach) -> str:
    """`512k`, `480k to 528k`; beyond LONGEST nothing was tried."""
    if not reach.perhaps:
        return "does not fit"
    if reach.surely >= LONGEST:
        return f"{length_label(LONGEST)} or more"
    if reach.surely == reach.perhaps:
        return length_label(reach.surely)
    return f"{length_label(reach.surely)} to {length_label(reach.perhaps)}"
