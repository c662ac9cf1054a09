"""The parts of a traced step in the order in which they are stacked, with their names and colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.metrics.step_parts import EFFICIENCY, IDEAL, PART_COLUMNS


@dataclass(frozen=True, slots=True)
class PartStyle:
    """How one part of a step is called and coloured."""

    label: str
    color: str
    columns: tuple[str, ...]
    """Whose sum it is."""
    is_left_out_at_zero: bool = False
    """Whether a cell that has none of it does not name it."""


# Attention in blues, what moves in reds and yellows, the rest in greys and greens: apart in print too.
IDEAL_PART = PartStyle("ideal attention (local / capacity)", "#08519C", (IDEAL,))
EFFICIENCY_PART = PartStyle("kernel at the block shape", "#6BAED6", (EFFICIENCY,))
WHOLE_ATTENTION = PartStyle("attention compute", "#2171B5", ("part_attention_ms",))
LATER_PARTS = (
    PartStyle("load imbalance", "#BDD7E7", ("part_imbalance_ms",)),
    PartStyle("packing", "#7A5195", ("part_packing_ms",)),
    PartStyle("attention exchange, transfer", "#CB181D", ("part_transfer_ms",)),
    PartStyle("attention exchange, waiting", "#FCAE91", ("part_waiting_ms",)),
    PartStyle("parameters and gradients, exposed", "#FE9929", ("part_model_state_ms",)),
    PartStyle("other communication, exposed", "#FEE391", ("part_other_exchange_ms",)),
    PartStyle("optimizer", "#238B45", ("part_optimizer_ms",)),
    PartStyle("other compute", "#74C476", ("part_other_compute_ms",)),
    PartStyle("device copies", "#C7E9C0", ("part_copies_ms",), is_left_out_at_zero=True),
    PartStyle("idle", "#D9D9D9", ("part_idle_ms",)),
)
WHOLE_STEP = (
    PartStyle("attention compute", "#2171B5", ("part_attention_ms", "part_imbalance_ms")),
    *LATER_PARTS[1:],
)


def waterfall_of(cell: Mapping[Any, Any] | pd.Series[Any]) -> list[tuple[PartStyle, float]]:
    """Every part of a cell's step with its milliseconds, from ideal attention to idle time.

    Attention is not split where it took no longer than what was to be its best, or where that is not known.
    """
    is_split = bool(cell[EFFICIENCY] >= 0)
    parts = ((IDEAL_PART, EFFICIENCY_PART) if is_split else (WHOLE_ATTENTION,)) + LATER_PARTS
    return parts_of(cell, parts)


def parts_of(
    cell: Mapping[Any, Any] | pd.Series[Any], styles: Iterable[PartStyle]
) -> list[tuple[PartStyle, float]]:
    """These parts with their milliseconds, less those that a cell without them does not name."""
    found = ((part, part_ms(cell, part)) for part in styles)
    return [(part, ms) for part, ms in found if ms or not part.is_left_out_at_zero]


def part_ms(cell: Mapping[Any, Any] | pd.Series[Any], style: PartStyle) -> float:
    """The milliseconds of one part."""
    return float(sum(cell[column] for column in style.columns))


def step_ms(cell: Mapping[Any, Any] | pd.Series[Any]) -> float:
    """The traced step of a cell's busiest rank, the sum of its parts."""
    return float(sum(cell[column] for column in PART_COLUMNS))
