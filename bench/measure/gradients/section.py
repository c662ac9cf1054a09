"""Gradients of the first step, written into the cell's folder and not into its record. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from bench.config import Cell, MeasureConfig
from bench.measure.facts import PassFacts, RankReport


class GradientsFacts(PassFacts[None, None]):
    name = "gradients"
    part = None
    needs_all_ranks = True

    def is_asked(self, measure: MeasureConfig) -> bool:
        return measure.gradients

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> None:
        """Nothing: the gradients are in a file, and the record has no section for them."""


FACTS = GradientsFacts()
