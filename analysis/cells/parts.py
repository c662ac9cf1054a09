"""Parts of a traced step with their labels and colours, in the order in which figures stack them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.labels import number_label, percent_label
from analysis.read.step_parts import BEYOND_IDEAL, IDEAL, PART_COLUMNS

HAS_PARTS_COLUMN = "part_attention_ms"
"""Column with a value for every cell whose step is split into parts."""
CellRow = Mapping[Any, Any] | pd.Series


@dataclass(frozen=True, slots=True)
class DrawnPart:
    """Label and look of one part of a step."""

    label: str
    color: str
    columns: tuple[str, ...]
    """Columns whose sum is the part."""
    hatch: str = ""

    def ms(self, cell: CellRow) -> float:
        """Return the milliseconds of this part in a cell's step."""
        return float(sum(cell[column] for column in self.columns))


# Attention is blue, communication red and yellow, the rest green and grey. Hatches are for print.
ATTENTION = DrawnPart("attention compute", "#2171B5", (HAS_PARTS_COLUMN,))
IMBALANCE = DrawnPart("load imbalance", "#BDD7E7", ("part_imbalance_ms",))
WITH_IDEAL = (
    DrawnPart("ideal attention", "#08519C", (IDEAL,)),
    DrawnPart("attention beyond ideal", "#6BAED6", (BEYOND_IDEAL,)),
)
LATER_PARTS = (
    DrawnPart("packing", "#C2A5CF", ("part_packing_ms",), "|||"),
    DrawnPart("attention: transfer", "#CB181D", ("part_transfer_ms",), "///"),
    DrawnPart("attention: waiting", "#FCAE91", ("part_waiting_ms",), ".."),
    DrawnPart("parameters, gradients", "#FE9929", ("part_model_state_ms",), "\\\\\\"),
    DrawnPart("other communication", "#FEE391", ("part_other_communication_ms",), "oo"),
    DrawnPart("optimizer", "#238B45", ("part_optimizer_ms",), "xxx"),
    DrawnPart("other compute", "#74C476", ("part_other_compute_ms",)),
    DrawnPart("device copies", "#C7E9C0", ("part_copies_ms",), "---"),
    DrawnPart("idle", "#E4E4E4", ("part_idle_ms",)),
)


def parts_of(cell: CellRow) -> list[tuple[DrawnPart, float]]:
    """Return the parts of a cell's step with their milliseconds, from attention to idle; none has 0 ms.

    Attention compute is one part where ideal attention is unknown, or attention took no longer than the
    ideal.
    """
    attention = WITH_IDEAL if cell[BEYOND_IDEAL] > 0 else (ATTENTION,)
    return [(part, ms) for part in (*attention, IMBALANCE, *LATER_PARTS) if (ms := part.ms(cell))]


def step_ms(cell: CellRow) -> float:
    """Return the milliseconds of a cell's traced step, the sum of its parts."""
    return float(sum(cell[column] for column in PART_COLUMNS))


def part_text(label: str, ms: float, cell: CellRow) -> str:
    """Return `optimizer 10.0 ms, 9.1 %`."""
    return f"{label} {number_label(ms)} ms, {percent_label(ms / step_ms(cell))}"
