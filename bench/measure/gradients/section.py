"""Facts of the gradients pass, which writes a file into the cell's folder and no section. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from bench.config import Cell, MeasureConfig
from bench.measure.facts import PassFacts, RankReport


class GradientsFacts(PassFacts[None, None]):
    name = "gradients"
    part_type = None
    needs_all_ranks = True

    def is_requested(self, measure: MeasureConfig) -> bool:
        return measure.gradients

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> None:
        """Return None, because the gradients are in a file and the record has no section for them."""


FACTS = GradientsFacts()
