"""The parts of a traced step in the order in which they are stacked, with their names and colours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.labels import number_label, percent_label
from analysis.read.step_parts import EFFICIENCY, IDEAL, PART_COLUMNS

SPLIT = "part_attention_ms"
"""The column that has a value wherever a step is split."""
LEAST_SHARE = 0.0005
REST = "rest, under 0.1 % each"
Cell = Mapping[Any, Any] | pd.Series


@dataclass(frozen=True, slots=True)
class Part:
    """How one part of a step is called and drawn."""

    label: str
    color: str
    columns: tuple[str, ...]
    """Whose sum it is."""
    hatch: str = ""

    def ms(self, cell: Cell) -> float:
        """What it took of a cell's step."""
        return float(sum(cell[column] for column in self.columns))


# Attention in blues, what moves in reds and yellows, the rest in greens and greys; hatched: for print.
IDEAL_ATTENTION = Part("ideal attention", "#08519C", (IDEAL,))
BEYOND_IDEAL = Part("attention beyond ideal", "#6BAED6", (EFFICIENCY,))
ATTENTION = Part("attention compute", "#2171B5", (SPLIT,))
IMBALANCE = Part("load imbalance", "#BDD7E7", ("part_imbalance_ms",))
LATER_PARTS = (
    Part("packing", "#C2A5CF", ("part_packing_ms",), "|||"),
    Part("exchange: transfer", "#CB181D", ("part_transfer_ms",), "///"),
    Part("exchange: waiting", "#FCAE91", ("part_waiting_ms",), ".."),
    Part("parameters, gradients", "#FE9929", ("part_model_state_ms",), "\\\\\\"),
    Part("other communication", "#FEE391", ("part_other_communication_ms",), "oo"),
    Part("optimizer", "#238B45", ("part_optimizer_ms",), "xxx"),
    Part("other compute", "#74C476", ("part_other_compute_ms",)),
    Part("device copies", "#C7E9C0", ("part_copies_ms",), "---"),
    Part("idle", "#E4E4E4", ("part_idle_ms",)),
)
WHOLE_STEP = (Part(ATTENTION.label, ATTENTION.color, (SPLIT, *IMBALANCE.columns)), *LATER_PARTS)


def has_ideal(cell: Cell) -> bool:
    """Whether it is known what attention would take at best."""
    return bool(pd.notna(cell[IDEAL]))


def waterfall_of(cell: Cell) -> list[tuple[Part, float]]:
    """The parts of a cell's step that took any time, in milliseconds, from ideal attention to idle time.

    Attention beyond ideal is negative where attention took less than what was to be its best. Parts that
    would read as 0.0 % are one, the last.
    """
    first = (IDEAL_ATTENTION, BEYOND_IDEAL) if has_ideal(cell) else (ATTENTION,)
    found = parts_of(cell, (*first, IMBALANCE, *LATER_PARTS))
    least_ms = LEAST_SHARE * step_ms(cell)
    small = [(part, ms) for part, ms in found if abs(ms) < least_ms]
    if len(small) < 2:  # noqa: PLR2004  one is shown by itself
        return found
    rest = Part(REST, "#9E9E9E", tuple(column for part, _ in small for column in part.columns))
    return [*(each for each in found if each not in small), (rest, rest.ms(cell))]


def parts_of(cell: Cell, parts: Iterable[Part]) -> list[tuple[Part, float]]:
    """These parts with their milliseconds, less those that took no time."""
    return [(part, ms) for part in parts if (ms := part.ms(cell))]


def step_ms(cell: Cell) -> float:
    """The traced step of a cell's busiest rank, the sum of its parts."""
    return float(sum(cell[column] for column in PART_COLUMNS))


def part_text(label: str, ms: float, cell: Cell) -> str:
    """`optimizer 10.0 ms, 9.1 %`."""
    return f"{label} {number_label(ms)} ms, {percent_label(ms / step_ms(cell))}"
