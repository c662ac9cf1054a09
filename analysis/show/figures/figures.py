"""The figures of a report: their definitions in FIGURES, and functions that draw and write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from analysis.cells.capacity import capacities_of
from analysis.cells.cells import Cells
from analysis.cells.equivalence import LossComparison
from analysis.cells.parts import HAS_PARTS_COLUMN
from analysis.cells.position_losses import PositionGroup
from analysis.cells.quality import ScoredCell
from analysis.cells.selection import Selection
from analysis.cells.statuses import excluded_statuses, undecided_statuses
from analysis.labels import count_label
from analysis.read.traced_shares import MAX_TRACED_TO_TIMED, MIN_TRACED_TO_TIMED
from analysis.show.figures.drawn_series import DrawnColumn, draw_flat_marks, draw_series
from analysis.show.figures.failures import failure_marks, sheet_against, write_no_result
from analysis.show.figures.loss_curves import write_equivalence
from analysis.show.figures.position_curves import write_position_losses
from analysis.show.figures.quality_sheets import write_quality
from analysis.show.figures.scaling import EFFICIENCY, scaling_sheet
from analysis.show.figures.sheet import Heading, Sheet, complete_sheet, save_figure
from analysis.show.figures.step_bars import step_parts_sheet
from analysis.show.figures.style import (
    LENGTH,
    LOG_FROM_RATIO,
    PERCENT,
    REFERENCE,
    linear_y,
    scale_y,
    set_byte_ticks,
)
from analysis.show.section import FigureFile

MANY_LENGTHS_RATIO, LOG_OF_MANY_LENGTHS = 4, 2
"""If the longest length is more than 4 times the shortest, the axis of tokens/s is logarithmic as soon as its
values span a ratio of 2, because tokens/s fall with the length."""
PARTLY_DRAWN = "Only a part of the series is drawn; all are in summary.csv."
TRACED = "traced step"


@dataclass(frozen=True, slots=True)
class FigureSpec:
    """Definition of one figure of the report."""

    title: str
    y_label: str
    caption: str
    """Sentences on measured cells: what is drawn, in which unit, and what the marks mean."""
    needs: str
    """Column of the frame; the figure is left out if no cell has a value in it."""
    draw: Callable[[Cells, Sheet], None] | None = None
    """Function that draws on axes against length."""
    make: Callable[[Cells, Heading], Sheet] | None = None
    """Function that makes the whole figure, if its x axis is not the length."""
    of_predicted: str = ""
    """Caption of predicted cells."""
    of_replayed: str = ""
    """Caption of replayed cells."""
    statuses: Callable[[pd.DataFrame], pd.Series[str]] | None = None
    """Function that returns the statuses by which cells are marked; None to mark them by their status."""

    def caption_for(self, cells: Cells) -> str:
        """Return the captions for the provenances of these cells, joined."""
        captions = ((self.of_replayed, cells.are_replayed), (self.of_predicted, cells.are_predicted))
        special = [caption for caption, rows in captions if caption and rows.any()]
        has_measured = not (cells.are_replayed | cells.are_predicted).all()
        return ". ".join([self.caption, *special] if has_measured or not special else special)

    def sheet(self, cells: Cells, heading: Heading) -> Sheet:
        """Return the figure of these cells before it is laid out."""
        if self.make is not None:
            return self.make(cells, heading)
        marked = cells if self.statuses is None else cells.with_statuses(self.statuses(cells.frame))
        marks = failure_marks(marked.series)
        # no step of a predicted cell was traced
        label = self.y_label.replace("traced", "expected") if cells.is_all_predicted else self.y_label
        sheet = sheet_against(LENGTH, LENGTH.values(cells.frame), heading, marks, label)
        if cells.frame[self.needs].isna().all():
            write_no_result(sheet, cells)
        elif self.draw is not None:
            self.draw(cells, sheet)
        return sheet


def _traced_steps_text(cell: Mapping[Any, Any]) -> str:
    return count_label(int(cell["traced_steps"]), TRACED) if cell["traced_steps"] > 0 else ""


THROUGHPUT = DrawnColumn(
    "tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "95 % interval",
    band="predicted_tokens_per_s{}", with_link="tokens_per_s_with_link", unit="tokens/s",
)  # fmt: skip
PEAK_MEMORY = DrawnColumn("peak_allocated_bytes", band="predicted_peak_allocated{}_bytes")
CAPACITY_LINES = ("--", ":", "-.")
MAX_CAPACITY_RATIO = 8
"""Without a cell out of memory, a capacity above this multiple of the highest peak is not drawn."""
CPU_LIMIT_REMARK = "On a CPU the limit counts the memory of tensors, to within some MiB"
ATTENTION_EFFICIENCY = DrawnColumn("attention_of_one_device")
OUT_ERROR = DrawnColumn("out_error_ulps", unit="ulps")
CONTROL_ERROR = DrawnColumn("control_out_error_ulps", unit="ulps, the kernel alone")


def draw_throughput(cells: Cells, sheet: Sheet) -> None:
    """Draw tokens per second with the interval of the median, or the band of a prediction."""
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
    """Draw peak allocated memory, and the lowest capacities as lines if they are near or a cell ran out."""
    frame, capacities = cells.frame, capacities_of(cells.frame)
    has_run_out = frame["status"].eq("out_of_memory").any()
    highest = np.inf if has_run_out else MAX_CAPACITY_RATIO * frame[PEAK_MEMORY.column].max()
    near = [(size, label) for size, label in capacities if size <= highest][: len(CAPACITY_LINES)]
    draw_series(sheet, cells, PEAK_MEMORY)
    sizes = pd.Series([size for size, _ in near], dtype="float64")
    scale_y(sheet.axes, pd.concat([frame[PEAK_MEMORY.column], sizes]))
    for (size, label), line in zip(near, CAPACITY_LINES, strict=False):
        sheet.axes.axhline(size, label=f"capacity: {label}", linestyle=line, **REFERENCE)
    set_byte_ticks(sheet.axes)
    if cells.is_cpu and near:
        sheet.remarks.append(CPU_LIMIT_REMARK)
    rest = len(capacities) - len(near)
    if rest:
        left_out = count_label(rest, "other capacity", "other capacities")
        sheet.remarks.append(f"Left out: {left_out} (in summary.csv)")


def draw_attention_efficiency(cells: Cells, sheet: Sheet) -> None:
    """Draw the parallel efficiency of attention alone."""
    draw_series(sheet, cells, ATTENTION_EFFICIENCY)
    scale_y(sheet.axes, cells.frame[ATTENTION_EFFICIENCY.column], log_from=np.inf)
    sheet.axes.yaxis.set_major_formatter(PERCENT)


def draw_error_growth(cells: Cells, sheet: Sheet) -> None:
    """Draw the output's error against float64, and as flat marks the error of the kernel on one device."""
    draw_series(sheet, cells, OUT_ERROR)
    draw_flat_marks(sheet, cells, CONTROL_ERROR, "the kernel alone on one device")
    scale_y(sheet.axes, pd.concat([cells.frame[quantity.column] for quantity in (OUT_ERROR, CONTROL_ERROR)]))
    sheet.axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _draw_share(purpose: str) -> Callable[[Cells, Sheet], None]:
    """Return a function that draws transfer, with bars over the traced steps, and waiting as flat marks."""
    ends = (f"{purpose}_transfer_low_share", f"{purpose}_transfer_high_share")
    transfer = DrawnColumn(f"{purpose}_transfer_share", *ends, unit="transfer", samples=_traced_steps_text)
    waiting = DrawnColumn(f"{purpose}_waiting_share", unit="waiting", samples=_traced_steps_text)

    def draw(cells: Cells, sheet: Sheet) -> None:
        draw_series(sheet, cells, transfer)
        draw_flat_marks(sheet, cells, waiting, "waiting for the last rank")
        top = cells.frame[[waiting.column, transfer.column, ends[1]]].max().max()
        top = top * 1.1 if top > 0 else 1.0
        linear_y(sheet.axes, -0.02 * top, top)  # the axis must not cut a mark at 0 in half
        sheet.axes.yaxis.set_major_formatter(PERCENT)
        if cells.is_cpu:
            sheet.remarks.append("On a CPU, exposed time includes contention for cores")
        excluded = int(cells.frame["void_traced_steps"].sum())
        if excluded:
            limits = f"over {MAX_TRACED_TO_TIMED} or under {MIN_TRACED_TO_TIMED} times the timed step"
            sheet.remarks.append(f"Left out: {count_label(excluded, TRACED)} that took {limits}")

    return draw


SHARE = f"share of the {TRACED}"
TRANSFER = (
    "Transfer of {} as a share of the traced steps of all ranks: time in flight after the last rank has"
    " arrived, while the rank computes nothing. Flat marks: waiting for the last rank, as the same share."
    " Points: median of the traced steps. Bars: lowest to highest"
)
PREDICTED_TRANSFER = "Predicted: exposed transfer as a share of the expected step; waiting is not predicted"
MODEL_BAND = "Bars: band of the model, which is not a confidence interval"
FIGURES: Mapping[str, FigureSpec] = {
    "throughput": FigureSpec(
        "Throughput", "tokens/s, all ranks together",
        "Tokens per second of all ranks together: tokens of all sequences in a step over the median step time"
        " of the slowest rank. Bars: 95 % interval of the median, from six samples on",
        needs=THROUGHPUT.column, draw=draw_throughput,
        of_replayed="Replayed: tokens of a step over the median step time of one rank that ran without the"
        " others, an upper bound. Bars: down to the rate with all of the link's time exposed, which is"
        " modelled",
        of_predicted=f"Predicted: tokens of a step over its expected time. {MODEL_BAND}",
    ),
    "peak_memory": FigureSpec(
        "Peak memory", "peak allocated, worst rank",
        "Peak allocated memory of the worst rank in steady state: the largest sum of its tensors after the"
        " warm-up steps",
        needs=PEAK_MEMORY.column, draw=draw_peak_memory, statuses=undecided_statuses,
        of_replayed="Replayed: peak allocated memory of the one rank that ran, without the memory of NCCL",
        of_predicted=f"Predicted: expected tensors of one rank at the peak. {MODEL_BAND}. Whether a cell fits"
        " also depends on the memory of a process beyond its tensors",
    ),
    "attention_communication": FigureSpec(
        "Attention communication", SHARE, TRANSFER.format("attention communication"),
        needs="attention_transfer_share", draw=_draw_share("attention"),
        statuses=partial(excluded_statuses, column="attention_transfer_share"),
        of_predicted=PREDICTED_TRANSFER,
    ),
    "communication_share": FigureSpec(
        "All communication", SHARE,
        TRANSFER.format("all communication (attention, parameters, gradients, data and loss)"),
        needs="communication_transfer_share", draw=_draw_share("communication"),
        statuses=partial(excluded_statuses, column="communication_transfer_share"),
        of_predicted=PREDICTED_TRANSFER,
    ),
    "step_parts": FigureSpec(
        "Parts of a step", "",
        "Parts of the traced step as shares, on the rank that attention kept busiest. Every instant counts"
        " once: as compute, else as exposed communication, else as idle. Marks below the bars: series",
        needs=HAS_PARTS_COLUMN, make=step_parts_sheet,
        of_predicted="Predicted: parts of the expected step as shares, on the rank with most work",
    ),
    "scaling": FigureSpec(
        "Strong scaling", "",
        "Parallel efficiency: tokens/s per rank over tokens/s per rank of the base, for the same work."
        " Points: the fastest cell for each number of ranks",
        needs=EFFICIENCY, make=scaling_sheet,
    ),
    "attention_of_one_device": FigureSpec(
        "Attention alone", "parallel efficiency",
        "Parallel efficiency of attention: forward and backward time of the same kernel on one device,"
        " divided by the number of ranks that share a sequence, over the median call of the slowest rank",
        needs=ATTENTION_EFFICIENCY.column, draw=draw_attention_efficiency,
    ),
    "error_growth": FigureSpec(
        "Error of the output", "ulps of the dtype",
        "Largest error of the attention output against float64 among sampled tokens, in units in the last"
        " place (ulps) at the row's maximum. Flat marks: the kernel alone on one device",
        needs=OUT_ERROR.column, draw=draw_error_growth,
    ),
}  # fmt: skip
"""Figures of the report by the name of their files."""


def figures_for(cells: Cells) -> list[str]:
    """Return the names of the figures for which some cell has a value.

    If no cell has any, return the first figure, which then says that there is no result.
    """
    names = [name for name, spec in FIGURES.items() if cells.frame[spec.needs].notna().any()]
    return names or [*FIGURES][: min(len(cells), 1)]


def draw_figure(name: str, selected: Selection) -> Sheet:
    """Return the complete figure of this name in FIGURES."""
    spec, cells = FIGURES[name], selected.cells
    caveats = [cells.banner, PARTLY_DRAWN if selected.note else None]
    heading = Heading(spec.title, cells.heading, " ".join(filter(None, caveats)) or None)
    return complete_sheet(lambda: spec.sheet(cells, heading))


def write_figure(name: str, selected: Selection, folder: Path) -> FigureFile:
    """Write a figure as PNG and SVG into the folder, and return it for the page."""
    return save_figure(draw_figure(name, selected), folder / name, FIGURES[name].caption_for(selected.cells))


def write_figures(
    selected: Selection,
    folder: Path,
    compared: Sequence[LossComparison] = (),
    scored: Sequence[ScoredCell] = (),
    positions: PositionGroup | None = None,
) -> list[FigureFile]:
    """Write every figure of these cells and return them, figures of trainings and of scores first."""
    folder.mkdir(exist_ok=True)
    first = write_equivalence(compared, folder, selected.cells.banner)
    first += write_quality(scored, folder, selected.cells.banner)
    first += write_position_losses(positions, folder, selected.cells.banner)
    return [*first, *(write_figure(name, selected, folder) for name in figures_for(selected.cells))]
