"""Figure of loss equivalence: losses of trainings of one workload, and distances with the noise floor."""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from analysis.cells.equivalence import ComparedTraining, LossComparison, Training
from analysis.cells.series import styles_of
from analysis.show.figures.sheet import Heading, Sheet, complete_sheet, new_sheet, save_figure
from analysis.show.figures.style import MUTED_COLOR, plot_options
from analysis.show.section import FigureFile
from bench.record.record import Role
from bench.record.trajectory_noise import SIGNAL_NAMES, units
from bench.strategies.plot_style import PlotStyle

PANEL_INCHES = (1.9, 1.7, 1.7)
MISTAKE_COLORS = ("#8B0000", "#C04000", "#A0522D", "#B8860B", "#7B3F00", "#CD5C5C")
TITLE = "Loss equivalence"
CAPTION = (
    "Top: loss of each step in nats per token{of_seed}. Middle: distance of the loss, in nats, from the mean"
    " of the equivalent trainings (data parallelism and its controls){over_seeds}. Bottom: distance of the"
    " gradient norm from the same mean, relative to it{over_seeds}. Shaded: noise floor; a training is"
    " equivalent if its mean over all steps lies within it. Dotted: known mistakes, made on purpose"
)


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """One training as a line."""

    loss: Sequence[float]
    label: str
    options: dict[str, Any]
    """Keyword arguments of matplotlib."""
    distances: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Distance from the mean of the equivalent trainings by signal and step; empty for the reference."""


def write_equivalence(
    comparisons: Sequence[LossComparison], folder: Path, banner: str | None
) -> list[FigureFile]:
    """Write a figure for each comparison as PNG and SVG into the folder, and return them for the page."""
    return [
        save_figure(
            complete_sheet(partial(_sheet, comparison, banner)),
            folder / figure_name(comparison),
            _caption(comparison),
        )
        for comparison in comparisons
    ]


def _caption(comparison: LossComparison) -> str:
    if len(comparison.seeds) == 1:
        return CAPTION.format(of_seed="", over_seeds="")
    return CAPTION.format(of_seed=", for the first seed", over_seeds=", root mean square over the seeds")


def figure_name(comparison: LossComparison) -> str:
    """Return the name of the figure's files, such as `loss_equivalence_1k_qwen3_nano_fp32_zero3_adamw`."""
    return "loss_equivalence_" + re.sub(r"[^\w.=-]+", "_", comparison.name)


def _sheet(comparison: LossComparison, banner: str | None) -> Sheet:
    sheet = new_sheet(Heading(TITLE, f"{_machine(comparison)}: {comparison.name}", banner), PANEL_INCHES)
    losses, loss_distances, norm_distances = sheet.panels
    curves = [*_curves(comparison)]
    for curve in curves:
        losses.plot(curve.loss, label=curve.label, **curve.options)
    losses.set_ylabel("loss (nats)")
    floor = _floor_by_step(comparison)
    for axes, signal in ((loss_distances, "loss"), (norm_distances, "grad_norm")):
        _draw_distances(axes, curves, floor[signal], signal)
    loss_distances.set_ylabel("loss distance (nats)")
    norm_distances.set_ylabel("norm distance (relative)")
    norm_distances.set_xlabel("step")
    for axes in sheet.panels:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(-0.5, comparison.steps - 0.5)
    return sheet


def _curves(comparison: LossComparison) -> Iterator[TrainingCurve]:
    """Yield the reference, then the trainings in the order of the comparison."""
    styles = styles_of(str(row.training.setting("strategy")) for row in comparison.rows)
    options = {"color": "black", "linewidth": 2.6, "alpha": 0.4}
    yield TrainingCurve(comparison.reference.loss, "data parallelism", options)
    drawn: Counter[str] = Counter()
    for row in comparison.rows:
        training = row.training
        kind = str(training.role if training.role == Role.INJECTED_FAULT else training.setting("strategy"))
        number = drawn[kind]
        drawn[kind] += training.role != Role.CONTROL
        label = "controls" if training.role == Role.CONTROL else training.label
        options = _plot_options(training, number, styles)
        yield TrainingCurve(row.trainings[0].loss, label, options, _distances(comparison, row))


def _machine(comparison: LossComparison) -> str:
    """Return provenance and device, `measured, AMD EPYC`."""
    record = comparison.reference.record
    return ", ".join(filter(None, (record.provenance, record.environment.device_name)))


def _distances(comparison: LossComparison, row: ComparedTraining) -> dict[str, list[float]]:
    """Return the distance from the mean of the equivalent trainings by signal and step.

    The distance of the gradient norm is relative. Of several seeds the root mean square is returned.
    """
    seeds, distances = {seed.reference.seed: seed for seed in comparison.seeds}, []
    for training in row.trainings:
        mean = seeds[training.seed].with_controls(training).centre
        losses = zip(training.loss, mean.loss, strict=False)
        norms = zip(training.grad_norm, mean.grad_norm, strict=False)
        distances.append(
            {
                "loss": [abs(loss - mean_loss) for loss, mean_loss in losses],
                "grad_norm": [abs(norm - mean_norm) / (abs(mean_norm) or 1.0) for norm, mean_norm in norms],
            }
        )
    return _root_mean_square(distances)


def _floor_by_step(comparison: LossComparison) -> dict[str, list[float]]:
    """Return the distances of a training that is at the noise floor in every step, as `_distances` does."""
    floor, distances = comparison.floor(), []
    for seed in comparison.seeds:
        unit, norms = units(seed.reference), seed.reference.grad_norm
        relative = (size / (abs(norm) or 1.0) for size, norm in zip(unit["grad_norm"], norms, strict=True))
        losses = [floor.loss * size for size in unit["loss"]]
        distances.append({"loss": losses, "grad_norm": [floor.grad_norm * size for size in relative]})
    return _root_mean_square(distances)


def _root_mean_square(seeds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return the root mean square over seeds, by signal and step."""
    means = {}
    for name in SIGNAL_NAMES:
        steps = zip(*(seed[name] for seed in seeds), strict=False)
        means[name] = [statistics.fmean(value * value for value in step) ** 0.5 for step in steps]
    return means


def _plot_options(training: Training, number: int, styles: Mapping[str, PlotStyle]) -> dict[str, Any]:
    if training.role == Role.INJECTED_FAULT:
        color = MISTAKE_COLORS[number % len(MISTAKE_COLORS)]
        return {"color": color, "linestyle": ":", "linewidth": 1.3}
    if training.role == Role.CONTROL:
        return {"color": MUTED_COLOR, "linewidth": 0.8, "alpha": 0.7}
    style = styles[str(training.setting("strategy"))]
    return plot_options(style, number) | {"markersize": 4, "linewidth": 1.2}


def _draw_distances(axes: Axes, curves: Sequence[TrainingCurve], floor: Sequence[float], signal: str) -> None:
    """Draw the distances of all curves on a logarithmic axis, and the noise floor as a shaded area."""
    distances = [(curve.distances[signal], curve.options) for curve in curves if curve.distances]
    positive = [value for values, _ in distances for value in values if value > 0] or [1.0]
    bottom = max(min(*positive, *floor), min(floor) / 1000) / 3  # distances of 0 are drawn at the bottom
    axes.set_yscale("log")
    for values, options in distances:
        axes.plot([max(value, bottom) for value in values], **options)
    axes.fill_between(range(len(floor)), bottom, floor, color="#D0D0D0", alpha=0.6, linewidth=0)
    axes.set_ylim(bottom=bottom)
