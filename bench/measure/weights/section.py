"""Facts of the weights pass, which writes a checkpoint into the cell's folder and no section. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from bench.config import TRAINED_PREFIX, Cell, MeasureConfig
from bench.measure.facts import PassFacts, RankReport

FOLDER_NAME = TRAINED_PREFIX + "{strategy}"
"""Folder of the checkpoint in the folder of the cell; its name becomes that of the model."""


class WeightsFacts(PassFacts[None, None]):
    name = "weights"
    part_type = None
    needs_all_ranks = True

    def is_requested(self, measure: MeasureConfig) -> bool:
        return measure.weights

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> None:
        """Return None, because the weights are in a folder and the record has no section for them."""


FACTS = WeightsFacts()
