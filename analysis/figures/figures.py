"""Frame and axes in, drawing on them. One table names the figures."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from analysis.cells.cells import Cells
from analysis.cells.score import PEAK
from analysis.cells.series import Series
from analysis.figures.axes import LOG_FROM_RATIO, finish_length_axes, scale_y, write_remarks
from analysis.figures.capacity_lines import (
    capacity_remarks,
    draw_capacities,
    drawn_capacities,
    make_room_above,
)
from analysis.figures.failures import Mark, length_marks, with_undecided, with_void
from analysis.figures.quantity import Area, Quantity, areas_of, placed
from analysis.figures.scaling import plot_scaling, scaling_areas, scaling_marks
from analysis.figures.steps import (
    SPLIT,
    VOID_REASON,
    has_ideal,
    plot_step_parts,
    plot_waterfall,
    step_part_areas,
    waterfall_areas,
    waterfall_inches,
)
from analysis.figures.style import MUTED_COLOR, line_of, of_step
from analysis.labels import bytes_label, count_label
from bench.labels import SIZES
from bench.record import Provenance

AXES_INCHES = 3.4
AGAINST_LENGTH = "sequence length"
MANY_LENGTHS_RATIO, LOG_OF_MANY_LENGTHS = 4, 2
"""Lengths that span more than the first have tokens/s on a logarithmic axis, from the second ratio on:
attention grows with the square of the length, so a linear axis would squash the long ones."""
MAX_LEGEND_ENTRIES = 24
MAX_SIZE_TICKS = 7
MIN_ERROR_REACH = 0.05
"""An axis of errors shows at least so much on either side, so that small ones look small."""
BACKGROUND: Mapping[str, Any] = {
    "marker": "_", "markersize": 12, "markeredgewidth": 2.5, "linestyle": ":", "linewidth": 1.4,
    "zorder": 1.8,
}  # fmt: skip
"""A flat mark behind the others: no filling tells it apart from them, as that is a variant's."""
SHARE_NOUNS: Mapping[str, str] = {
    "attention": "share of attention exchange",
    "communication": "share of communication",
}
Handle = Line2D | ErrorbarContainer | BarContainer
"""What a legend can show."""


@dataclass(frozen=True, slots=True)
class FigureKind:
    """One figure of the report."""

    title: str
    y_label: str
    draw: Callable[[Cells, Axes], None]
    reading: str
    """The reduction behind a point."""
    inches: Callable[[Cells], float] = lambda _: AXES_INCHES
    """The height of its axes."""
    areas: Callable[[Cells], Iterable[Area]] = lambda _: ()
    """What can be pointed at."""
    narrow_areas: Callable[[Cells], Iterable[Area]] | None = None
    """The same for narrow screens; None where they are at the same data."""
    narrow_lines: float = 1.0
    """How many times as high its axes are on narrow screens."""
    against: str | None = AGAINST_LENGTH
    """What its x axis is; a figure against nothing has a row for each cell."""
    marks: Callable[[Cells], Sequence[Mark]] = length_marks
    needs: str | None = None
    """A column; the figure is left out where no cell has a value in it."""
    of_predicted: str = ""
    """The reading of predicted cells, of which nothing was measured."""
    without_ideal: str = ""
    """Its title where no cell has an ideal to begin with."""

    def title_of(self, cells: Cells) -> str:
        """Its title in words that are true of these cells."""
        return self.without_ideal if self.without_ideal and not has_ideal(cells) else self.title

    def reading_of(self, cells: Cells) -> str:
        """What is behind the points of these cells."""
        if not cells.are_predicted.any() or not self.of_predicted:
            return self.reading
        return self.of_predicted if cells.is_all_predicted else f"{self.reading}. {self.of_predicted}"

    def y_label_of(self, cells: Cells) -> str:
        """The y axis in words that are true of these cells."""
        return of_step(self.y_label, cells)


def _traced_steps(cell: Mapping[Any, Any]) -> str:
    return count_label(int(cell["traced_steps"]), "traced step") if cell["traced_steps"] > 0 else ""


def _shares(purpose: str) -> tuple[Quantity, Quantity]:
    """Transfer of a purpose, drawn in front, and waiting, drawn behind it."""
    noun = SHARE_NOUNS[purpose]
    transfer, waiting = f"{purpose}_transfer", f"{purpose}_waiting"
    return (
        Quantity(
            f"{transfer}_share", noun, f"{transfer}_low_share", f"{transfer}_high_share",
            unit="transfer", samples=_traced_steps,
        ),
        Quantity(f"{waiting}_share", noun, unit="waiting", samples=_traced_steps),
    )  # fmt: skip


THROUGHPUT = Quantity(
    "tokens_per_s", "throughput", "tokens_per_s_low", "tokens_per_s_high", "95 % interval",
    band="predicted_tokens_per_s{}", unit="tokens/s",
)  # fmt: skip
PEAK_MEMORY = Quantity("peak_allocated_bytes", "peak memory", band="predicted_peak_allocated{}_bytes")
PREDICTION_ERROR = Quantity(
    "step_time_error_share", "prediction beside a measurement", "step_time_error_low_share",
    "step_time_error_high_share", "band of the model", unit="step time",
)  # fmt: skip
PEAK_ERROR = Quantity(PEAK, PREDICTION_ERROR.noun, unit="peak allocated")
ATTENTION_OF_SINGLE = Quantity("attention_of_single", "attention call")
OUT_ERROR = Quantity("out_error_ulps", "attention call", unit="ulps")
CONTROL_ERROR = Quantity("control_out_error_ulps", OUT_ERROR.noun, unit="ulps, the kernel alone")
EXCHANGE, EXCHANGE_WAITING = _shares("attention")
COMMUNICATION, COMMUNICATION_WAITING = _shares("communication")


def plot_throughput(cells: Cells, axes: Axes) -> None:
    """Tokens per second against length, with the interval of the median, or the band of a prediction."""
    quantity = THROUGHPUT
    _draw_series(axes, cells.series, quantity)
    scale_y(axes, cells.frame[quantity.column], log_from=_log_from(cells))
    if axes.get_yscale() == "log":
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    )
    finish_length_axes(axes, cells, column=quantity.column, noun=quantity.noun)


def _log_from(cells: Cells) -> float:
    lengths = cells.frame.loc[cells.frame["tokens_per_s"].notna(), "seq_len"]
    is_wide = len(lengths) > 0 and lengths.max() > MANY_LENGTHS_RATIO * lengths.min()
    return LOG_OF_MANY_LENGTHS if is_wide else LOG_FROM_RATIO


def plot_peak_memory(cells: Cells, axes: Axes) -> None:
    """Peak allocated memory of the worst rank against length, and what a rank may use."""
    quantity = PEAK_MEMORY
    drawn = drawn_capacities(cells)
    _draw_series(axes, cells.series, quantity)
    scale_y(axes, pd.concat([cells.frame[quantity.column], pd.Series([each.size_bytes for each in drawn])]))
    make_room_above(axes, drawn)
    _label_sizes(axes)
    write_remarks(axes, capacity_remarks(cells, drawn))
    finish_length_axes(axes, with_undecided(cells), column=quantity.column, noun=quantity.noun)
    draw_capacities(axes, drawn)


def plot_prediction_error(cells: Cells, axes: Axes) -> None:
    """How far predicted step times (solid, bars: the band) and peaks (flat marks) are from measured ones."""
    quantity = PREDICTION_ERROR
    _draw_series(axes, cells.series, quantity)
    _draw_background(axes, cells.series, PEAK, "peak allocated")
    zero = axes.get_yaxis_transform()
    axes.hlines(0, 0, 1, transform=zero, color=MUTED_COLOR, linestyle="--", linewidth=1.1, zorder=1.5)
    errors = cells.frame[[quantity.column, PEAK, quantity.low, quantity.high]]
    least, most = errors.min().min(), errors.max().max()
    axes.set_ylim(
        1.1 * np.fmin(least, -MIN_ERROR_REACH), 1.1 * np.fmax(most, MIN_ERROR_REACH)
    )  # fmin and fmax leave out what is missing
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:+g} %" if value else "0 %"))
    finish_length_axes(axes, cells, column=quantity.column, noun=quantity.noun)


def plot_communication_share(cells: Cells, axes: Axes) -> None:
    """Transfer (solid, bars over the traced steps) and waiting (flat marks) of all communication."""
    _plot_share(cells, axes, COMMUNICATION, COMMUNICATION_WAITING)


def plot_exchange_share(cells: Cells, axes: Axes) -> None:
    """The same of the attention exchange alone: what a strategy itself costs."""
    _plot_share(cells, axes, EXCHANGE, EXCHANGE_WAITING)


def plot_attention_of_single(cells: Cells, axes: Axes) -> None:
    """How near a strategy comes to one device's attention divided by its ranks."""
    quantity = ATTENTION_OF_SINGLE
    _draw_series(axes, cells.series, quantity)
    scale_y(axes, cells.frame[quantity.column], is_linear=True)
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    finish_length_axes(axes, cells, column=quantity.column, noun=quantity.noun)


def plot_error_growth(cells: Cells, axes: Axes) -> None:
    """Error of the output against float64, and that of the kernel alone (flat marks)."""
    quantity = OUT_ERROR
    _draw_series(axes, cells.series, quantity)
    _draw_background(axes, cells.series, CONTROL_ERROR.column, "the kernel alone on one device")
    scale_y(axes, pd.concat([cells.frame[quantity.column], cells.frame[CONTROL_ERROR.column]]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    finish_length_axes(axes, cells, column=quantity.column, noun=quantity.noun)


def _plot_share(cells: Cells, axes: Axes, transfer: Quantity, waiting: Quantity) -> None:
    _draw_series(axes, cells.series, transfer)
    _draw_background(axes, cells.series, waiting.column, "waiting for the last rank")
    top = cells.frame[[waiting.column, transfer.high, transfer.column]].max().max()
    top = top * 1.1 if top > 0 else 1.0
    axes.set_ylim(-0.02 * top, top)  # a share of 0 must not be cut in half by the axis
    axes.yaxis.set_major_formatter(PercentFormatter(xmax=1))
    write_remarks(axes, _remarks(cells))
    finish_length_axes(axes, with_void(cells, transfer.column), column=transfer.column, noun=transfer.noun)


def _marks_with_void(column: str) -> Callable[[Cells], Sequence[Mark]]:
    return lambda cells: length_marks(with_void(cells, column))


FIGURES: Mapping[str, FigureKind] = {
    "throughput": FigureKind(
        "Throughput", "tokens/s, all ranks together", plot_throughput,
        "Whole-sequence tokens over the median step of the slowest rank;"
        " bars: 95 % interval of the median (n >= 6)",
        of_predicted="Predicted: tokens of a step over its expected time; bars: band of the model, not a"
        " confidence interval",
        areas=areas_of(THROUGHPUT),
    ),
    "peak_memory": FigureKind(
        "Peak memory", "peak allocated, worst rank", plot_peak_memory,
        "Highest tensor allocation of the worst rank in steady state",
        marks=lambda cells: length_marks(with_undecided(cells)),
        of_predicted="Predicted: expected tensors of one rank; bars: band of the model, not a confidence"
        " interval; whether they fit counts what a process takes beside tensors, too",
        areas=areas_of(PEAK_MEMORY),
    ),
    "attention_exchange": FigureKind(
        "Attention exchange", "share of the traced step", plot_exchange_share,
        "Exposed attention exchange with all ranks there, of the time of all ranks: median of the traced"
        " steps, bars from lowest to highest; flat marks: waiting for the last rank",
        marks=_marks_with_void("attention_transfer_share"),
        of_predicted="Predicted: exposed transfer of the expected step; waiting is not predicted",
        areas=areas_of(EXCHANGE, EXCHANGE_WAITING),
    ),
    "communication_share": FigureKind(
        "Communication share", "share of the traced step", plot_communication_share,
        "Exposed communication with all ranks there, of the time of all ranks: median of the traced steps,"
        " bars from lowest to highest; flat marks: waiting for the last rank",
        marks=_marks_with_void("communication_transfer_share"),
        of_predicted="Predicted: exposed transfer of the expected step; waiting is not predicted",
        areas=areas_of(COMMUNICATION, COMMUNICATION_WAITING),
    ),
    "step_parts": FigureKind(
        "Where the step went", "share of the traced step", plot_step_parts,
        "The traced step of the rank that attention kept busiest, every instant counted once: compute, else"
        " exposed communication, else idle",
        marks=_marks_with_void(SPLIT),
        of_predicted="Predicted: the expected step of the rank with most to do",
        areas=step_part_areas,
    ),
    "waterfall": FigureKind(
        "From ideal attention to the step", "", plot_waterfall,
        "Shares of the traced step of the rank that attention kept busiest; ideal: local's attention for the"
        " same work over the cell's cores or GPUs, where local ran",
        inches=waterfall_inches, against=None, without_ideal="From attention to the step", marks=lambda _: [],
        of_predicted="Predicted: shares of the expected step of the rank with most to do; ideal: local's"
        " attention for the same work over the cell's GPUs, where local is among the cells",
        areas=waterfall_areas, narrow_areas=partial(waterfall_areas, narrow=True), narrow_lines=1.7,
    ),
    "prediction_error": FigureKind(
        "Predicted beside measured", "predicted over measured, less 1", plot_prediction_error,
        "Step time predicted, over the measured median; bars: band of the model, not a"
        " confidence interval; where they meet the dashed line, the measured step lies in it. Flat marks:"
        " peak allocated",
        needs="step_time_error_share",
        areas=areas_of(PREDICTION_ERROR, PEAK_ERROR),
    ),
    "scaling": FigureKind(
        "Strong scaling", "tokens/s per rank, of the base's", plot_scaling,
        "Tokens/s per rank over the base's at equal work (parallel efficiency; times the ratio of ranks it is"
        " the speed-up); where several cells have as many ranks, the fastest",
        against="ranks", marks=scaling_marks, needs="scaling_efficiency",
        areas=scaling_areas,
    ),
    "attention_of_single": FigureKind(
        "Attention alone", "of one device's attention / ranks", plot_attention_of_single,
        "The same kernel's forward and backward on one device, divided by the ranks that share a sequence,"
        " over the slowest rank's median call",
        needs="attention_of_single",
        areas=areas_of(ATTENTION_OF_SINGLE),
    ),
    "error_growth": FigureKind(
        "Error of the output", "ulps of the dtype", plot_error_growth,
        "Largest deviation from float64 over sampled tokens, in units in the last place at a row's maximum;"
        " flat marks: the kernel alone on one device",
        needs="out_error_ulps",
        areas=areas_of(OUT_ERROR, CONTROL_ERROR),
    ),
}  # fmt: skip


def figures_for(cells: Cells) -> list[str]:
    """The names of the figures that have something to show of these cells."""
    return [
        name for name, kind in FIGURES.items() if kind.needs is None or cells.frame[kind.needs].notna().any()
    ]


def _remarks(cells: Cells) -> list[str]:
    """What a reader of the communication shares must know of these cells."""
    void = int(cells.frame["void_traced_steps"].sum())
    remarks = [f"{count_label(void, 'void traced step')} left out: {VOID_REASON}"] if void else []
    return [*remarks, "on a CPU, exposed time includes contention for cores"] if cells.is_cpu else remarks


def legend_entries(axes: Axes) -> dict[str, Handle]:
    """What the legend shows by label: each series, or each strategy where the series are too many."""
    handles, labels = axes.get_legend_handles_labels()
    pairs = zip(labels, handles, strict=True)
    entries: dict[str, Handle] = {
        label: each for label, each in pairs if isinstance(each, Line2D | ErrorbarContainer | BarContainer)
    }
    if len(entries) <= MAX_LEGEND_ENTRIES:
        return entries
    return {label.split(",")[0]: each for label, each in entries.items()}


def _draw_series(axes: Axes, series: Sequence[Series], quantity: Quantity) -> None:
    for each, rows, x in placed(series, quantity.column):
        axes.errorbar(
            x, rows[quantity.column], yerr=_error_bars(rows, quantity), capsize=3,
            color=each.style.color, marker=each.style.marker, markersize=6, linewidth=1.4, alpha=0.9,
            label=each.label, **line_of(each.variant_number),
        )  # fmt: skip


def _draw_background(axes: Axes, series: Sequence[Series], column: str, label: str) -> None:
    """What stands beside each point of the series, with one entry in the legend for all of them."""
    for each, rows, x in (drawn := [*placed(series, column)]):
        axes.plot(x, rows[column], color=each.style.color, alpha=0.6, **BACKGROUND)
    if drawn:
        # A container as the series are: a line would stand before them in the legend.
        axes.errorbar([], [], color=MUTED_COLOR, label=label, **BACKGROUND)


def _error_bars(rows: pd.DataFrame, quantity: Quantity) -> list[pd.Series[float]] | None:
    """Distances from the value down and up; NaN, so nothing, where a cell has no interval and no band."""
    value = rows[quantity.column]
    low, high = (rows[end] if end else value * np.nan for end in (quantity.low, quantity.high))
    if quantity.band is not None:
        predicted = rows["provenance"].eq(Provenance.PREDICTED)
        low = low.where(~predicted, rows[quantity.band.format("_low")])
        high = high.where(~predicted, rows[quantity.band.format("_high")])
    down, up = value - low, high - value
    return None if down.isna().all() else [down.clip(lower=0), up.clip(lower=0)]


def _label_sizes(axes: Axes) -> None:
    """Ticks of a y axis of bytes: powers of two, or on a linear one round numbers of one unit."""
    low, high = axes.get_ylim()
    if axes.get_yscale() == "log":
        axes.set_yticks(_binary_ticks(low, high))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: bytes_label(value)))
        return
    name, unit = next(((name, size) for name, size in SIZES.items() if size <= high), ("B", 1))
    ticks = MaxNLocator(steps=[1, 2, 2.5, 5, 10]).tick_values(0, high / unit)
    axes.set_yticks([float(tick * unit) for tick in ticks if tick * unit <= high])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / unit:g} {name}"))


def _binary_ticks(low: float, high: float) -> list[float]:
    """Powers of two from `low` to `high` bytes, evenly thinned."""
    powers = range(math.ceil(math.log2(low)), math.floor(math.log2(high)) + 1)
    return [2.0**power for power in powers[:: math.ceil(len(powers) / MAX_SIZE_TICKS) or 1]]
