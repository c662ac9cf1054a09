"""The parts of a traced step in the order in which they are stacked, with their names and colours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.labels import number_label, percent_label
from analysis.read.step_parts import BEYOND_IDEAL, IDEAL, PART_COLUMNS

SPLIT = "part_attention_ms"
"""The column that has a value wherever a step is split."""
CellRow = Mapping[Any, Any] | pd.Series


@dataclass(frozen=True, slots=True)
class DrawnPart:
    """How one part of a step is called and drawn."""

    label: str
    color: str
    columns: tuple[str, ...]
    """Whose sum it is."""
    hatch: str = ""

    def ms(self, cell: CellRow) -> float:
        """What it took of a cell's step."""
        return float(sum(cell[column] for column in self.columns))


# Attention in blue, what moves in reds and yellows, the rest in greens and greys; hatched: for print.
ATTENTION = DrawnPart("attention compute", "#2171B5", (SPLIT,))
IMBALANCE = DrawnPart("load imbalance", "#BDD7E7", ("part_imbalance_ms",))
WITH_IDEAL = (
    DrawnPart("ideal attention", "#08519C", (IDEAL,)),
    DrawnPart("attention beyond ideal", "#6BAED6", (BEYOND_IDEAL,)),
)
LATER_PARTS = (
    DrawnPart("packing", "#C2A5CF", ("part_packing_ms",), "|||"),
    DrawnPart("exchange: transfer", "#CB181D", ("part_transfer_ms",), "///"),
    DrawnPart("exchange: waiting", "#FCAE91", ("part_waiting_ms",), ".."),
    DrawnPart("parameters, gradients", "#FE9929", ("part_model_state_ms",), "\\\\\\"),
    DrawnPart("other communication", "#FEE391", ("part_other_communication_ms",), "oo"),
    DrawnPart("optimizer", "#238B45", ("part_optimizer_ms",), "xxx"),
    DrawnPart("other compute", "#74C476", ("part_other_compute_ms",)),
    DrawnPart("device copies", "#C7E9C0", ("part_copies_ms",), "---"),
    DrawnPart("idle", "#E4E4E4", ("part_idle_ms",)),
)


def parts_of(cell: CellRow) -> list[tuple[DrawnPart, float]]:
    """Return the parts of a cell's step that took any time, in milliseconds, from attention to idle time.

    Attention compute is one part where the ideal is not known, or attention took no longer than that.
    """
    first = WITH_IDEAL if cell[BEYOND_IDEAL] > 0 else (ATTENTION,)
    return [(part, ms) for part in (*first, IMBALANCE, *LATER_PARTS) if (ms := part.ms(cell))]


def step_ms(cell: CellRow) -> float:
    """The traced step of a cell's busiest rank, the sum of its parts."""
    return float(sum(cell[column] for column in PART_COLUMNS))


def part_text(label: str, ms: float, cell: CellRow) -> str:
    """`optimizer 10.0 ms, 9.1 %`."""
    return f"{label} {number_label(ms)} ms, {percent_label(ms / step_ms(cell))}"
