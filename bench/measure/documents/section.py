"""What packed documents leave of the attention's work, and how evenly ranks share it. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from bench.config import Cell
from bench.measure.facts import PassFacts, RankReport, together


class DocumentsSection(Struct, frozen=True, kw_only=True):
    """The documents of every full-length step; only of cells whose sequences hold several."""

    documents: list[int]
    """By step, of all sequences, padding not counted."""
    pairs: list[int]
    """By step the (query, key) pairs that a causal mask within documents leaves, of all sequences."""
    computed_pairs: list[int]
    """By step the (query, key) pairs that are computed, those of padding included."""
    area: list[list[int]]
    """By rank and step the (query, key, head) triples that the rank computes of one layer."""
    imbalance: float | None = 1.0
    """Those of the busiest rank over the mean of all ranks, the median over the steps: ranks wait in each.
    Null of a replay, which has one rank."""


class DocumentsFacts(PassFacts[DocumentsSection, DocumentsSection]):
    name = "documents"
    part = DocumentsSection
    is_own_work = False

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> DocumentsSection:
        parts = self.parts(reports)
        area = together(parts, "area")
        by_step = [max(ranks) / statistics.fmean(ranks) for ranks in zip(*area["area"], strict=True)]
        imbalance = statistics.median(by_step) if cell.replay.rank is None else None
        return replace(parts[0], **area, imbalance=imbalance)


FACTS = DocumentsFacts()
