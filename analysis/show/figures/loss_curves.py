"""Losses of equal work over each other and, beneath, how far they are apart, with the floor of the noise."""

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

from analysis.cells.equivalence import Compared, Comparison, Training
from analysis.cells.series import styles_of
from analysis.show.figures.sheet import Heading, Sheet, drawn, new_sheet, save
from analysis.show.figures.style import MUTED_COLOR, look_of
from analysis.show.section import FigureFile
from bench.record.record import Role
from bench.record.trajectory_noise import NAMES, units
from bench.strategies.plot_style import PlotStyle

PANEL_INCHES = (1.9, 1.7, 1.7)
MISTAKE_COLORS = ("#8B0000", "#C04000", "#A0522D", "#B8860B", "#7B3F00", "#CD5C5C")
TITLE = "Loss equivalence"
READING = (
    "Top: loss of each step, of several seeds that of the first. Beneath: how far it is from the mean of"
    " equivalent trainings, plain data parallelism and its controls, and how far the gradient norm is,"
    " relative; of several seeds the root mean square. Shaded: the noise floor; a training is the same whose"
    " mean over all steps lies in it. Dotted curves are known mistakes, made on purpose"
)


@dataclass(frozen=True, slots=True)
class Curve:
    """One training as a line."""

    loss: Sequence[float]
    label: str
    look: dict[str, Any]
    apart: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By signal and step, from the mean of the equivalent ones; empty for the reference."""


def write_equivalence(
    comparisons: Sequence[Comparison], folder: Path, banner: str | None
) -> list[FigureFile]:
    """A figure for each comparison, as PNG and SVG in the folder, and as the page shows them."""
    return [
        save(drawn(partial(_sheet, each, banner)), folder / name_of(each), READING) for each in comparisons
    ]


def name_of(comparison: Comparison) -> str:
    """The name of its files: `loss_equivalence_1k_qwen3_nano_fp32_zero3_adamw`."""
    return "loss_equivalence_" + re.sub(r"[^\w.=-]+", "_", comparison.name)


def _sheet(comparison: Comparison, banner: str | None) -> Sheet:
    sheet = new_sheet(Heading(TITLE, f"{_machine(comparison)}: {comparison.name}", banner), PANEL_INCHES)
    losses, loss_apart, norm_apart = sheet.panels
    curves = [*_curves(comparison)]
    for curve in curves:
        losses.plot(curve.loss, label=curve.label, **curve.look)
    losses.set_ylabel("loss (nats)")
    floor = _floor_by_step(comparison)
    for axes, signal in ((loss_apart, "loss"), (norm_apart, "grad_norm")):
        _draw_apart(axes, [(each.apart[signal], each.look) for each in curves if each.apart], floor[signal])
    loss_apart.set_ylabel("apart (nats)")
    norm_apart.set_ylabel("norm, relative")
    norm_apart.set_xlabel("step")
    for axes in sheet.panels:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(-0.5, comparison.steps - 0.5)
    return sheet


def _curves(comparison: Comparison) -> Iterator[Curve]:
    """The reference first, mistakes last, so that sound ones are not hidden."""
    styles = styles_of(str(row.training.setting("strategy")) for row in comparison.rows)
    plain = {"color": "black", "linewidth": 2.6, "alpha": 0.4}
    yield Curve(comparison.reference.loss, "data parallelism", plain)
    drawn: Counter[str] = Counter()
    for row in comparison.rows:
        training = row.training
        kind = str(training.role if training.role == Role.INJECTED_FAULT else training.setting("strategy"))
        number = drawn[kind]
        drawn[kind] += training.role != Role.CONTROL
        label = "controls" if training.role == Role.CONTROL else training.label
        yield Curve(row.trainings[0].loss, label, _look(training, number, styles), _apart(comparison, row))


def _machine(comparison: Comparison) -> str:
    """`measured, AMD EPYC`."""
    record = comparison.reference.record
    return ", ".join(filter(None, (record.provenance, record.environment.device_name)))


def _apart(comparison: Comparison, row: Compared) -> dict[str, list[float]]:
    """Return each signal's distance from the mean of equivalent trainings by step; the norm's is relative."""
    seeds, distances = {seed.reference.seed: seed for seed in comparison.seeds}, []
    for training in row.trainings:
        centre = seeds[training.seed].draw(training).centre
        losses = zip(training.loss, centre.loss, strict=False)
        norms = zip(training.grad_norm, centre.grad_norm, strict=False)
        distances.append(
            {
                "loss": [abs(own - other) for own, other in losses],
                "grad_norm": [abs(own - other) / (abs(other) or 1.0) for own, other in norms],
            }
        )
    return _over_seeds(distances)


def _floor_by_step(comparison: Comparison) -> dict[str, list[float]]:
    """Return the distances that `_apart` would of a training at the floor in every step."""
    floor, distances = comparison.floor(), []
    for seed in comparison.seeds:
        unit, norms = units(seed.reference), seed.reference.grad_norm
        of_norm = (each / (abs(norm) or 1.0) for each, norm in zip(unit["grad_norm"], norms, strict=True))
        losses = [floor.loss * each for each in unit["loss"]]
        distances.append({"loss": losses, "grad_norm": [floor.grad_norm * each for each in of_norm]})
    return _over_seeds(distances)


def _over_seeds(seeds: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Return the root mean square over seeds, by signal and step."""
    found = {}
    for name in NAMES:
        steps = zip(*(seed[name] for seed in seeds), strict=False)
        found[name] = [statistics.fmean(each * each for each in step) ** 0.5 for step in steps]
    return found


def _look(training: Training, number: int, styles: Mapping[str, PlotStyle]) -> dict[str, Any]:
    if training.role == Role.INJECTED_FAULT:
        color = MISTAKE_COLORS[number % len(MISTAKE_COLORS)]
        return {"color": color, "linestyle": ":", "linewidth": 1.3}
    if training.role == Role.CONTROL:
        return {"color": MUTED_COLOR, "linewidth": 0.8, "alpha": 0.7}
    style = styles[str(training.setting("strategy"))]
    return look_of(style, number) | {"markersize": 4, "linewidth": 1.2}


def _draw_apart(
    axes: Axes, curves: Sequence[tuple[Sequence[float], dict[str, Any]]], floor: Sequence[float]
) -> None:
    known = [each for values, _ in curves for each in values if each > 0] or [1.0]
    least = max(min(*known, *floor), min(floor) / 1000) / 3  # equal but for float64: at the bottom
    axes.set_yscale("log")
    for values, look in curves:
        axes.plot([max(each, least) for each in values], **look)
    axes.fill_between(range(len(floor)), least, floor, color="#D0D0D0", alpha=0.6, linewidth=0)
    axes.set_ylim(bottom=least)
