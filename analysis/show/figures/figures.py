"""Cells in, figures out. One table names the figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from analysis.cells.capacity import capacities_of
from analysis.cells.cells import Cells
from analysis.cells.equivalence import Comparison
from analysis.cells.parts import SPLIT
from analysis.cells.selection import Selection
from analysis.cells.statuses import excluded_statuses, undecided_statuses
from analysis.labels import bytes_label, count_label
from analysis.read.traced_shares import MAX_TRACED_TO_TIMED, MIN_TRACED_TO_TIMED
from analysis.show.figures.drawn_series import DrawnColumn, draw_beside, draw_series
from analysis.show.figures.failures import failure_marks, say_empty, sheet_against
from analysis.show.figures.loss_curves import write_equivalence
from analysis.show.figures.scaling import EFFICIENCY, scaling_sheet
from analysis.show.figures.sheet import Heading, Sheet, drawn, save
from analysis.show.figures.step_bars import step_parts_sheet
from analysis.show.figures.style import (
    LENGTH,
    LOG_FROM_RATIO,
    MAX_TICKS,
    PERCENT,
    REFERENCE,
    linear_y,
    scale_y,
)
from analysis.show.section import FigureFile
from bench.common.labels import SIZES

MANY_LENGTHS_RATIO, LOG_OF_MANY_LENGTHS = 4, 2
"""Over lengths that span more than the first, tokens/s are on a logarithmic axis from the second ratio on."""
SELECTED = "A part of the series; all are in summary.csv."
TRACED = "traced step"


@dataclass(frozen=True, slots=True)
class FigureKind:
    """One figure of the report, against length where `draw` draws it."""

    title: str
    y_label: str
    reading: str
    """The reduction behind a point."""
    needs: str
    """A column; the figure is left out where no cell has a value in it."""
    draw: Callable[[Cells, Sheet], None] | None = None
    make: Callable[[Cells, Heading], Sheet] | None = None
    """What makes a figure that is not against length."""
    of_predicted: str = ""
    """The reading of predicted cells, of which nothing was measured."""
    of_replayed: str = ""
    """The reading of replayed cells."""
    statuses: Callable[[pd.DataFrame], pd.Series[str]] | None = None
    """How this figure marks cells, where that is not by their own statuses."""

    def reading_of(self, cells: Cells) -> str:
        """What is behind the points of these cells."""
        kinds = ((self.of_replayed, cells.are_replayed), (self.of_predicted, cells.are_predicted))
        special = [reading for reading, rows in kinds if reading and rows.any()]
        is_measured = not (cells.are_replayed | cells.are_predicted).all()
        return ". ".join([self.reading, *special] if is_measured or not special else special)

    def sheet(self, cells: Cells, heading: Heading) -> Sheet:
        """The figure of these cells, before it is laid out."""
        if self.make is not None:
            return self.make(cells, heading)
        marked = cells if self.statuses is None else cells.with_statuses(self.statuses(cells.frame))
        marks = failure_marks(marked.series)
        # of a prediction no step was traced
        label = self.y_label.replace("traced", "expected") if cells.is_all_predicted else self.y_label
        sheet = sheet_against(LENGTH, LENGTH.values(cells.frame), heading, marks, label)
        if cells.frame[self.needs].isna().all():
            say_empty(sheet, cells)
        elif self.draw is not None:
            self.draw(cells, sheet)
        return sheet


def _traced_steps(cell: Mapping[Any, Any]) -> str:
    return count_label(int(cell["traced_steps"]), TRACED) if cell["traced_steps"] > 0 else ""


THROUGHPUT = DrawnColumn(
    "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "95 % interval",
    band="predicted_tokens_per_s{}", with_link="tokens_per_s_with_link", unit="tokens/s",
)  # fmt: skip
PEAK_MEMORY = DrawnColumn("peak_allocated_bytes", band="predicted_peak_allocated{}_bytes")
CAPACITY_LINES = ("--", ":", "-.")
FAR_ABOVE = 8
"""Without a cell that ran out of memory, a capacity this many times the highest peak has no line."""
CPU_LIMIT_REMARK = "On a CPU a limit counts what tensors take, to within some MiB"
ATTENTION_OF_SINGLE = DrawnColumn("attention_of_one_device")
OUT_ERROR = DrawnColumn("out_error_ulps", unit="ulps")
CONTROL_ERROR = DrawnColumn("control_out_error_ulps", unit="ulps, the kernel alone")


def draw_throughput(cells: Cells, sheet: Sheet) -> None:
    """Tokens per second, with the interval of the median, or the band of a prediction."""
    draw_series(sheet, cells, THROUGHPUT)
    axes = sheet.axes
    lengths = cells.frame.loc[cells.frame["tokens_per_s"].notna(), "seq_len"]
    is_wide = bool(lengths.max() > MANY_LENGTHS_RATIO * lengths.min())
    scale_y(axes, cells.frame["tokens_per_s"], log_from=LOG_OF_MANY_LENGTHS if is_wide else LOG_FROM_RATIO)
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    )


def draw_peak_memory(cells: Cells, sheet: Sheet) -> None:
    """Peak allocated memory of the worst rank; dashed the lowest capacities that are near or ran out."""
    frame, capacities = cells.frame, capacities_of(cells.frame)
    reach = (
        np.inf if frame["status"].eq("out_of_memory").any() else FAR_ABOVE * frame[PEAK_MEMORY.column].max()
    )
    near = [each for each in capacities if each[0] <= reach][: len(CAPACITY_LINES)]
    draw_series(sheet, cells, PEAK_MEMORY)
    sizes = pd.Series([size for size, _ in near], dtype="float64")
    scale_y(sheet.axes, pd.concat([frame[PEAK_MEMORY.column], sizes]))
    for (size, label), line in zip(near, CAPACITY_LINES, strict=False):
        sheet.axes.axhline(size, label=f"may use: {label}", linestyle=line, **REFERENCE)
    _label_sizes(sheet.axes)
    others = len(capacities) - len(near)
    if others:
        sheet.remarks.append(f"{count_label(others, 'other capacity', 'other capacities')} in summary.csv")
    if cells.is_cpu and near:
        sheet.remarks.append(CPU_LIMIT_REMARK)


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


def draw_attention_of_single(cells: Cells, sheet: Sheet) -> None:
    """How near a strategy comes to one device's attention divided by its ranks."""
    draw_series(sheet, cells, ATTENTION_OF_SINGLE)
    scale_y(sheet.axes, cells.frame[ATTENTION_OF_SINGLE.column], log_from=np.inf)
    sheet.axes.yaxis.set_major_formatter(PERCENT)


def draw_error_growth(cells: Cells, sheet: Sheet) -> None:
    """Error of the output against float64, and that of the kernel alone (flat marks)."""
    draw_series(sheet, cells, OUT_ERROR)
    draw_beside(sheet, cells, CONTROL_ERROR, "the kernel alone on one device")
    scale_y(sheet.axes, pd.concat([cells.frame[each.column] for each in (OUT_ERROR, CONTROL_ERROR)]))
    sheet.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_share(purpose: str) -> Callable[[Cells, Sheet], None]:
    """Transfer of a purpose (bars over the traced steps), and waiting (flat marks) behind it."""
    ends = (f"{purpose}_transfer_low_share", f"{purpose}_transfer_high_share")
    transfer = DrawnColumn(f"{purpose}_transfer_share", *ends, unit="transfer", samples=_traced_steps)
    waiting = DrawnColumn(f"{purpose}_waiting_share", unit="waiting", samples=_traced_steps)

    def draw(cells: Cells, sheet: Sheet) -> None:
        draw_series(sheet, cells, transfer)
        draw_beside(sheet, cells, waiting, "waiting for the last rank")
        top = cells.frame[[waiting.column, transfer.column, ends[1]]].max().max()
        top = top * 1.1 if top > 0 else 1.0
        linear_y(sheet.axes, -0.02 * top, top)  # a share of 0 must not be cut in half by the axis
        sheet.axes.yaxis.set_major_formatter(PERCENT)
        excluded = int(cells.frame["void_traced_steps"].sum())
        if excluded:
            limits = f"over {MAX_TRACED_TO_TIMED} or under {MIN_TRACED_TO_TIMED} times the timed step"
            sheet.remarks.append(f"Left out: {count_label(excluded, TRACED)} that took {limits}")
        if cells.is_cpu:
            sheet.remarks.append("On a CPU, exposed time includes contention for cores")

    return draw


SHARE = f"share of the {TRACED}"
OF_STEPS = ": median of the traced steps, bars from lowest to highest. Flat marks: waiting for the last rank"
OF_SHARES = "Predicted: exposed transfer of the expected step; waiting is not predicted"
FIGURES: Mapping[str, FigureKind] = {
    "throughput": FigureKind(
        "Throughput", "tokens/s, all ranks together",
        "Whole-sequence tokens over the median step of the slowest rank; bars: 95 % interval of the median,"
        " which takes six samples",
        needs=THROUGHPUT.column, draw=draw_throughput,
        of_replayed="Replayed: tokens of a step over the median step of one rank that ran without the others,"
        " an upper bound; bars: down to the rate with all of the link's time exposed, which is modelled",
        of_predicted="Predicted: tokens of a step over its expected time; bars: band of the model, not a"
        " confidence interval",
    ),
    "peak_memory": FigureKind(
        "Peak memory", "peak allocated, worst rank",
        "Highest tensor allocation of the worst rank in steady state",
        needs=PEAK_MEMORY.column, draw=draw_peak_memory, statuses=undecided_statuses,
        of_replayed="Replayed: highest tensor allocation of the one rank that ran, in steady state; without"
        " what NCCL holds",
        of_predicted="Predicted: expected tensors of one rank; bars: band of the model, not a confidence"
        " interval; whether they fit counts what a process takes beside tensors, too",
    ),
    "attention_communication": FigureKind(
        "Attention exchange", SHARE,
        "Attention's communication while no compute hides it and all its ranks are there, as a share of the"
        f" time of all ranks{OF_STEPS}",
        needs="attention_transfer_share", draw=_draw_share("attention"),
        statuses=partial(excluded_statuses, column="attention_transfer_share"), of_predicted=OF_SHARES,
    ),
    "communication_share": FigureKind(
        "Communication share", SHARE,
        "All communication (attention, parameters, gradients, the rest) while no compute hides it and all its"
        f" ranks are there, as a share of the time of all ranks{OF_STEPS}",
        needs="communication_transfer_share", draw=_draw_share("communication"),
        statuses=partial(excluded_statuses, column="communication_transfer_share"), of_predicted=OF_SHARES,
    ),
    "step_parts": FigureKind(
        "Where the step went", "",
        "The traced step of the rank that attention kept busiest, every instant counted once: compute, else"
        " exposed communication, else idle. Ideal attention: local's attention time for the same work, shared"
        " evenly by the cell's cores or GPUs; attention that took no longer than that is one part",
        needs=SPLIT, make=step_parts_sheet,
        of_predicted="Predicted: the expected step of the rank with most to do",
    ),
    "scaling": FigureKind(
        "Strong scaling", "tokens/s per rank, of the base's",
        "Tokens/s per rank over the base's at equal work (parallel efficiency; times the ratio of ranks it is"
        " the speed-up); where several cells have as many ranks, the fastest",
        needs=EFFICIENCY, make=scaling_sheet,
    ),
    "attention_of_one_device": FigureKind(
        "Attention alone", "of one device's attention / ranks",
        "The same kernel's forward and backward on one device, divided by the ranks that share a sequence,"
        " over the slowest rank's median call",
        needs=ATTENTION_OF_SINGLE.column, draw=draw_attention_of_single,
    ),
    "error_growth": FigureKind(
        "Error of the output", "ulps of the dtype",
        "Largest deviation from float64 over sampled tokens, in units in the last place at a row's maximum;"
        " flat marks: the kernel alone on one device",
        needs=OUT_ERROR.column, draw=draw_error_growth,
    ),
}  # fmt: skip


def figures_for(cells: Cells) -> list[str]:
    """Those that have something to show of these cells; the first where cells have no result but failures."""
    found = [name for name, kind in FIGURES.items() if cells.frame[kind.needs].notna().any()]
    return found or [*FIGURES][: min(len(cells), 1)]


def build(name: str, selected: Selection) -> Sheet:
    """The figure of this name in FIGURES, complete."""
    kind, cells = FIGURES[name], selected.cells
    caveats = [cells.banner, SELECTED if selected.note else None]
    heading = Heading(kind.title, cells.heading, " ".join(filter(None, caveats)) or None)
    return drawn(lambda: kind.sheet(cells, heading))


def write_figure(name: str, selected: Selection, folder: Path) -> FigureFile:
    """The figure as PNG and SVG in the folder, and as the page shows it."""
    return save(build(name, selected), folder / name, FIGURES[name].reading_of(selected.cells))


def write_figures(selected: Selection, folder: Path, compared: Sequence[Comparison] = ()) -> list[FigureFile]:
    """Every figure of these cells, those of trainings that are compared first."""
    folder.mkdir(exist_ok=True)
    losses = write_equivalence(compared, folder, selected.cells.banner)
    return [*losses, *(write_figure(name, selected, folder) for name in figures_for(selected.cells))]
