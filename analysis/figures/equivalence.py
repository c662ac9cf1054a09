"""Losses of equal work over each other and, beneath, how far they are apart, with the floor of the noise."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from analysis.cells.equivalence import FACTOR, Comparison, Training
from analysis.cells.series import styles_of
from analysis.figures.drawing import (
    NARROW_INCHES,
    WIDTH_INCHES,
    Figures,
    framed,
    header_lines,
    letters_in,
    save,
)
from analysis.figures.figure_file import FigureFile
from analysis.figures.figures import legend_entries
from analysis.figures.style import MUTED_COLOR, line_of
from bench.equivalence.trajectory import units
from bench.record import Role

PANEL_INCHES = (2.6, 2.2, 2.2)
MISTAKE_COLORS = ("#8B0000", "#C04000", "#A0522D", "#B8860B", "#7B3F00", "#CD5C5C")
TITLE = "Loss equivalence"
READING = (
    "Top: loss of each step. Beneath: how far it is from plain data parallelism, and how far the gradient"
    " norm is, relative; shaded: the noise floor, the largest distance between any two of the reference and"
    f" its controls (dotted: {FACTOR:g} times that). Dotted curves are known mistakes, made on purpose."
)


@dataclass(frozen=True, slots=True)
class Curve:
    """One training as a line."""

    training: Training
    label: str
    look: dict[str, Any]


def write_equivalence(
    comparisons: Sequence[Comparison], folder: Path, banner: str | None
) -> list[FigureFile]:
    """A figure for each comparison, as PNG and SVG in the folder, and as the page shows them."""
    folder.mkdir(exist_ok=True)
    return [save(_figures(each, banner), folder / name_of(each), TITLE, READING) for each in comparisons]


def name_of(comparison: Comparison) -> str:
    """The name of its files: `loss_equivalence_1k_qwen3_nano_fp32_zero3_adamw`."""
    return "loss_equivalence_" + re.sub(r"[^\w.=-]+", "_", comparison.name)


def _figures(comparison: Comparison, banner: str | None) -> Figures:
    return Figures(*(_figure(comparison, banner, each) for each in (WIDTH_INCHES, NARROW_INCHES)))


def _figure(comparison: Comparison, banner: str | None, width: float) -> Figure:
    subtitle = f"{comparison.machine}: {comparison.name}"
    lines = header_lines(subtitle, READING, None, banner, letters_in(width))
    frame = framed(TITLE, lines, PANEL_INCHES, width)
    losses, loss_apart, norm_apart = frame.panels
    curves = [*_curves(comparison)]
    for curve in curves:
        losses.plot(curve.training.loss, label=curve.label, **curve.look)
    losses.set_ylabel("loss (nats)")
    reference = comparison.reference
    unit, floor = units(reference), comparison.floor
    of_loss = [floor.loss * each for each in unit["loss"]]
    _draw_apart(loss_apart, curves[1:], _loss_apart(reference), of_loss)
    loss_apart.set_ylabel("|difference| (nats)")
    pairs = zip(unit["grad_norm"], reference.grad_norm, strict=True)
    of_norm = [floor.grad_norm * each / (abs(norm) or 1.0) for each, norm in pairs]
    _draw_apart(norm_apart, curves[1:], _norm_apart(reference), of_norm)
    norm_apart.set_ylabel("gradient norm, relative")
    norm_apart.set_xlabel("step")
    for axes in frame.panels:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(-0.5, comparison.steps - 0.5)
        axes.grid(visible=True, color="#E0E0E0", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    return frame.finish(legend_entries(losses))


def _curves(comparison: Comparison) -> Iterator[Curve]:
    """The reference first, mistakes last, so that sound ones are not hidden."""
    rows = [row.training for row in comparison.rows]
    styles = styles_of(str(each.setting("strategy")) for each in rows)
    yield Curve(comparison.reference, "data parallelism", {"color": "black", "linewidth": 2.6, "alpha": 0.4})
    drawn: Counter[str] = Counter()
    for training in rows:
        kind = str(training.role if training.role == Role.MISTAKE else training.setting("strategy"))
        number = drawn[kind]
        drawn[kind] += training.role != Role.CONTROL
        if training.role == Role.MISTAKE:
            color = MISTAKE_COLORS[number % len(MISTAKE_COLORS)]
            look: dict[str, Any] = {"color": color, "linestyle": ":", "linewidth": 1.3}
            yield Curve(training, training.label, look)
        elif training.role == Role.CONTROL:
            yield Curve(training, "controls", {"color": MUTED_COLOR, "linewidth": 0.8, "alpha": 0.7})
        else:
            style = styles[kind]
            look = {"color": style.color, "marker": style.marker, "markersize": 4, "linewidth": 1.2}
            yield Curve(training, training.label, look | line_of(number))


Apart = Callable[[Training], list[float]]


def _loss_apart(reference: Training) -> Apart:
    return lambda own: [abs(a - b) for a, b in zip(own.loss, reference.loss, strict=False)]


def _norm_apart(reference: Training) -> Apart:
    return lambda own: [
        abs(a - b) / (abs(b) or 1.0) for a, b in zip(own.grad_norm, reference.grad_norm, strict=False)
    ]


def _draw_apart(axes: Axes, curves: Sequence[Curve], apart: Apart, floor: Sequence[float]) -> None:
    drawn = [(apart(curve.training), curve) for curve in curves]
    known = [each for values, _ in drawn for each in values if each > 0] or [1.0]
    least = min(*known, *floor) / 3
    axes.set_yscale("log")
    for values, curve in drawn:
        axes.plot([max(each, least) for each in values], **curve.look)
    axes.fill_between(range(len(floor)), least, floor, color="#D0D0D0", alpha=0.6, linewidth=0)
    axes.plot([FACTOR * each for each in floor], color=MUTED_COLOR, linestyle=":", linewidth=1)
    axes.set_ylim(bottom=least)
