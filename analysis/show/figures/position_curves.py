"""Figure of the loss by position: mean losses in parts of the sequence, and differences with their limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.ticker import FixedFormatter, FixedLocator

from analysis.cells.position_losses import PositionGroup, by_position, differences
from analysis.cells.series import styles_of
from analysis.show.figures.sheet import Heading, HoverArea, Sheet, complete_sheet, new_sheet, save_figure
from analysis.show.figures.style import MUTED_COLOR, plot_options
from analysis.show.section import FigureFile
from bench.common.labels import length_label
from bench.record.record import Record, Role

TITLE = "Loss by position"
CAPTION = (
    "Top: mean loss in nats per token in 16 equal parts of the sequence, in the first full-length step."
    " Bottom: difference from {reference} relative to it, in the same parts and at the ends of shards (ends)."
    " Shaded: differences that rounding explains; a larger one is a wrong result"
)
FAULT_OPTIONS: Mapping[str, Any] = {"color": "#8B0000", "linestyle": ":", "marker": "x", "markersize": 4}
CONTROL_OPTIONS: Mapping[str, Any] = {"color": MUTED_COLOR, "linewidth": 0.8, "alpha": 0.7}


def write_position_losses(group: PositionGroup | None, folder: Path, banner: str | None) -> list[FigureFile]:
    """Write the figure as PNG and SVG into the folder, and return it; nothing without a group."""
    if group is None:
        return []
    reference = str(group.reference.config["strategy"])
    sheet = complete_sheet(partial(_sheet, group, banner))
    return [save_figure(sheet, folder / "loss_by_position", CAPTION.format(reference=reference))]


def _sheet(group: PositionGroup, banner: str | None) -> Sheet:
    config, device = group.reference.config, group.reference.environment.device_name
    details = f"{length_label(group.seq_len)}, {config.get('model')}, {config.get('dtype')}"
    heading = Heading(TITLE, f"{group.reference.provenance}, {device}: {details}", banner)
    sheet = new_sheet(heading, (1.7, 1.7))
    losses, distances = sheet.panels
    parts = len(by_position(group.reference).loss)
    lines: list[tuple[Record, str, dict[str, Any]]] = [
        (group.reference, f"{config['strategy']} (compared with)", {"color": "black", "linewidth": 2})
    ]
    lines += _compared_lines(group)
    floor = group.limit / 1e4
    for record, label, options in lines:
        values = [math.nan if value is None else value for value in by_position(record).loss]
        losses.plot(range(parts), values, label=label, **options)
        for part, value in enumerate(values):
            text = f"{label}, part {part + 1} of {parts}: {value:.4f} nats"
            sheet.hover_areas.append(HoverArea(losses, (part, part), (value, value), text))
        if record is not group.reference:
            by_part = differences(record, group.reference)
            relative = [math.nan if value is None else max(value, floor) for value in by_part]
            distances.plot(range(parts), relative[:-1], **options)
            distances.plot([parts + 0.5], relative[-1:], **{"marker": "o", **options})
    distances.axhspan(floor / 2, group.limit, color="#D0D0D0", alpha=0.6, linewidth=0)
    distances.set_yscale("log")
    distances.set_ylim(bottom=floor / 2)
    losses.set_ylabel("loss (nats)")
    distances.set_ylabel("relative difference")
    distances.set_xlabel("position in the sequence (tokens)")
    for axes in sheet.panels:
        axes.set_xlim(-0.5, parts + 1)
        ticks = [*range(0, parts, 4), parts + 0.5]
        labels = [length_label(group.seq_len * part // parts) if part else "0" for part in ticks[:-1]]  # type: ignore[operator]
        axes.xaxis.set_major_locator(FixedLocator(ticks))
        axes.xaxis.set_major_formatter(FixedFormatter([*labels, "ends"]))
    losses.tick_params(labelbottom=False)
    return sheet


def _compared_lines(group: PositionGroup) -> Iterator[tuple[Record, str, dict[str, Any]]]:
    """Yield each compared record with its label and matplotlib's keyword arguments."""
    styles = styles_of({str(record.config["strategy"]) for record in group.compared})
    for record in group.compared:
        strategy = str(record.config["strategy"])
        if record.role is Role.INJECTED_FAULT:
            yield record, f"mistake: {record.config['inject_fault']}", {**FAULT_OPTIONS}
        elif record.role is Role.CONTROL:
            yield record, "controls", {**CONTROL_OPTIONS}
        else:
            yield record, strategy, plot_options(styles[strategy], 0) | {"markersize": 4, "linewidth": 1.2}
