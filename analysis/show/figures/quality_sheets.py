"""Figures of `experiment=quality`: scores against length with speed and memory, by depth, and with chunks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from analysis.cells.quality import ScoredCell, by_series, question_ms, tasks_of
from analysis.cells.series import styles_of
from analysis.labels import bytes_label, number_label
from analysis.show.figures.sheet import (
    FittedText,
    Heading,
    HoverArea,
    Sheet,
    complete_sheet,
    new_sheet,
    save_figure,
)
from analysis.show.figures.style import (
    LENGTH,
    PERCENT,
    dodge,
    plot_options,
    scale_y,
    set_byte_ticks,
    style_x_axis,
)
from analysis.show.section import FigureFile
from bench.common.labels import length_label

PANEL_INCHES, DEPTH_INCHES = 1.2, 0.9
CAPTION = (
    "Accuracy of each task with Wilson's 95 % interval, then tokens/s and peak memory of training steps,"
    " against the length of the sequence"
)
DEPTH_CAPTION = (
    "Accuracy by the place of the asked statement in the context, from its beginning (0 %) to its end"
)
CHUNK_CAPTION = (
    "The same questions with the whole context and with retrieved chunks in its place (dotted, crosses):"
    " accuracy over all tasks, tokens that the model reads for a question, and the time of its forward pass"
)


@dataclass(frozen=True, slots=True)
class Panel:
    """Quantity of a panel against length."""

    title: str
    value: Callable[[ScoredCell], float | None]
    text: Callable[[float], str]
    """Function that returns a value as text with its unit."""
    interval: Callable[[ScoredCell], tuple[float, float] | None] = lambda _: None
    """Function that returns the ends of a cell's error bar; None for a cell without one."""
    is_share: bool = False
    """Whether values are shares from 0 to 1, drawn as percentages."""


@dataclass(frozen=True, slots=True)
class Line:
    """Cells of one series, with the keyword arguments of matplotlib."""

    label: str
    cells: Sequence[ScoredCell]
    options: dict[str, Any]
    dodge: float


def write_quality(cells: Sequence[ScoredCell], folder: Path, banner: str | None) -> list[FigureFile]:
    """Write the figures of these cells as PNG and SVG into the folder, and return them for the page."""
    scored = [cell for cell in cells if cell.quality is not None]
    if not scored:
        return []
    device = scored[0].record.environment.device_name
    subtitle = f"{scored[0].record.provenance}, {device}"

    def write(name: str, title: str, caption: str, draw: Callable[[Heading], Sheet]) -> FigureFile:
        heading = Heading(title, subtitle, banner)
        return save_figure(complete_sheet(partial(draw, heading)), folder / name, caption)

    figures = [write("quality", "Quality against length", CAPTION, partial(_length_sheet, scored))]
    bases = by_series([cell for cell in scored if cell.is_base])
    for name, series in bases.items():
        if any(depth is not None for cell in series if cell.quality for depth in cell.quality.depth):
            file = "quality_by_depth_" + re.sub(r"[^\w.]+", "_", name)
            title = f"Quality by depth: {name}"
            figures.append(write(file, title, DEPTH_CAPTION, partial(_depth_sheet, series)))
    with_chunks = [cell for cell in scored if cell.quality and cell.quality.chunks]
    if with_chunks:
        title = "Chunks against the whole context"
        figures.append(write("quality_chunks", title, CHUNK_CAPTION, partial(_chunk_sheet, with_chunks)))
    return figures


def _length_sheet(cells: Sequence[ScoredCell], heading: Heading) -> Sheet:
    panels = [*map(_accuracy_panel, tasks_of(cells)), _RATE, _PEAK]
    sheet = new_sheet(heading, [PANEL_INCHES] * len(panels))
    for axes, panel in zip(sheet.panels, panels, strict=True):
        for line in _lines(cells):
            _draw_line(sheet, axes, line, panel)
        _finish_panel(axes, panel, cells)
    _share_lengths(sheet, cells)
    return sheet


def _chunk_sheet(cells: Sequence[ScoredCell], heading: Heading) -> Sheet:
    pairs = [*zip(_score_panels(chunks=False), _score_panels(chunks=True), strict=True)]
    sheet = new_sheet(heading, [PANEL_INCHES] * len(pairs))
    for axes, (whole, chunks) in zip(sheet.panels, pairs, strict=True):
        for line in _lines(cells):
            _draw_line(sheet, axes, line, whole)
            options = line.options | {"linestyle": ":", "marker": "x"}
            dotted = Line(f"{line.label}, chunks", line.cells, options, line.dodge)
            _draw_line(sheet, axes, dotted, chunks)
        _finish_panel(axes, whole, cells, also=chunks)
    _share_lengths(sheet, cells)
    return sheet


def _depth_sheet(cells: Sequence[ScoredCell], heading: Heading) -> Sheet:
    """Return a heat map of accuracy for each task: length from left to right, depth from top to bottom."""
    tasks = tasks_of(cells)
    depths = sorted(
        {depth for cell in cells if cell.quality for depth in cell.quality.depth if depth is not None}
    )
    sheet = new_sheet(heading, [DEPTH_INCHES] * len(tasks))
    for axes, task in zip(sheet.panels, tasks, strict=True):
        accuracies = [[cell.accuracy(task, depth) for cell in cells] for depth in depths]
        shares = [[float("nan") if a is None else a.share for a in row] for row in accuracies]
        axes.imshow(shares, cmap="RdYlGn", vmin=0, vmax=1, aspect="auto")
        for y, row in enumerate(accuracies):
            for x, accuracy in enumerate(row):
                if accuracy is not None:
                    label = axes.text(x, y, _share_text(accuracy.share), ha="center", va="center", size=7)
                    sheet.fitted.append(FittedText(label, axes, 1 / len(cells)))
                    place = f"{length_label(cells[x].seq_len)}, depth {_share_text(depths[y])}"
                    text = f"{task}, {place}: {accuracy.right} of {accuracy.questions} right"
                    area = HoverArea(axes, (x - 0.5, x + 0.5), (y - 0.5, y + 0.5), text)
                    sheet.hover_areas.append(area)
        axes.set_ylabel(f"{task}\ndepth")
        axes.set_yticks(range(len(depths)), [*map(_share_text, depths)], size=7)
        axes.set_xticks(range(len(cells)), [length_label(cell.seq_len) for cell in cells])
        axes.grid(visible=False)
    sheet.axes.set_xlabel(LENGTH.title)
    return sheet


def _accuracy_panel(task: str) -> Panel:
    def value(cell: ScoredCell) -> float | None:
        accuracy = cell.accuracy(task)
        return None if accuracy is None else accuracy.share

    def interval(cell: ScoredCell) -> tuple[float, float] | None:
        accuracy = cell.accuracy(task)
        return None if accuracy is None else accuracy.interval

    return Panel(task, value, _share_text, interval, is_share=True)


def _score_panels(*, chunks: bool) -> list[Panel]:
    """Return the panels of accuracy over all tasks, tokens and time of a question."""

    def accuracy(cell: ScoredCell) -> float | None:
        scores = cell.scores(chunks=chunks)
        return None if scores is None else scores.right_share

    def tokens(cell: ScoredCell) -> float | None:
        scores = cell.scores(chunks=chunks)
        return None if scores is None else sum(scores.tokens) / len(scores.tokens)

    def time_ms(cell: ScoredCell) -> float | None:
        scores = cell.scores(chunks=chunks)
        return None if scores is None else question_ms(scores)

    return [
        Panel("accuracy", accuracy, _share_text, is_share=True),
        Panel("tokens a question", tokens, lambda count: f"{number_label(count)} tokens"),
        Panel("ms a question", time_ms, lambda time: f"{number_label(time)} ms"),
    ]


_RATE = Panel(
    "tokens/s",
    lambda cell: cell.results.rate(cell.results.median_ms),
    lambda rate: f"{number_label(rate)} tokens/s",
)
_PEAK = Panel("peak memory", lambda cell: cell.peak_bytes, bytes_label)


def _lines(cells: Sequence[ScoredCell]) -> Iterator[Line]:
    series = by_series(cells)
    styles = styles_of({cell.strategy for cell in cells})
    lengths = sorted({cell.seq_len for cell in cells})
    variants: dict[str, int] = {}
    for number, (name, row) in enumerate(series.items()):
        strategy = row[0].strategy
        variant = variants[strategy] = variants.get(strategy, -1) + 1
        options = plot_options(styles[strategy], variant)
        yield Line(name, row, options, dodge(number, len(series), lengths))


def _draw_line(sheet: Sheet, axes: Axes, line: Line, panel: Panel) -> None:
    points = [(cell, panel.value(cell)) for cell in line.cells]
    known = [(cell, value) for cell, value in points if value is not None]
    x, y = [cell.seq_len * line.dodge for cell, _ in known], [value for _, value in known]
    intervals = [panel.interval(cell) or (value, value) for cell, value in known]
    bars = [
        [value - low for value, (low, _) in zip(y, intervals, strict=True)],
        [high - value for value, (_, high) in zip(y, intervals, strict=True)],
    ]
    axes.errorbar(x, y, yerr=bars, label=line.label, capsize=2, elinewidth=0.8, **line.options)
    for place, (cell, value) in zip(x, known, strict=True):
        text = f"{line.label}, {length_label(cell.seq_len)}: {panel.title} {panel.text(value)}"
        sheet.hover_areas.append(HoverArea(axes, (place, place), (value, value), text))


def _finish_panel(axes: Axes, panel: Panel, cells: Sequence[ScoredCell], also: Panel | None = None) -> None:
    """Set title and scale of the y axis; `also` is a second panel whose values are drawn on the same axes."""
    axes.set_ylabel(panel.title)
    if panel.is_share:
        axes.set_ylim(-0.05, 1.05)
        axes.yaxis.set_major_formatter(PERCENT)
        return
    values = [shown.value(cell) for shown in (panel, also) if shown is not None for cell in cells]
    scale_y(axes, pd.Series([value for value in values if value is not None], dtype="float64"))
    if panel.title == _PEAK.title:
        set_byte_ticks(axes)
        return
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def _share_lengths(sheet: Sheet, cells: Sequence[ScoredCell]) -> None:
    """Give every panel the same axis of lengths, with labels below the last one only."""
    lengths = sorted({cell.seq_len for cell in cells})
    for axes in sheet.panels:
        style_x_axis(axes, LENGTH, lengths)
        if axes is not sheet.axes:
            axes.set_xlabel("")
            axes.tick_params(labelbottom=False)


def _share_text(share: float) -> str:
    return f"{share * 100:.0f} %"
