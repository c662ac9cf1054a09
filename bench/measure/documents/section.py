"""Section of the documents pass: attention pairs within packed documents, and their balance. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from bench.config import Cell
from bench.measure.facts import PassFacts, RankReport, join_by_rank


class DocumentsSection(Struct, frozen=True, kw_only=True):
    """Documents and attention pairs of every timed step of a cell that packs documents."""

    documents: list[int]
    """Number of documents of each step over all sequences, padding excluded."""
    pairs: list[int]
    """(Query, key) pairs of each step that a causal mask within documents leaves, over all sequences, padding
    excluded."""
    computed_pairs: list[int]
    """(Query, key) pairs of each step that are computed, padding included."""
    area: list[list[int]]
    """(Query, key, head) triples of one layer that a rank computes, by rank and step."""
    imbalance: float | None = 1.0
    """Median over the steps of the busiest rank's area divided by the mean area of all ranks. Ranks wait for
    the busiest in every step. Null for a replay, which has one rank."""


class DocumentsFacts(PassFacts[DocumentsSection, DocumentsSection]):
    name = "documents"
    part_type = DocumentsSection
    is_own_work = False

    def merge(self, reports: Sequence[RankReport], cell: Cell) -> DocumentsSection:
        parts = self.parts(reports)
        area = join_by_rank(parts, "area")
        ratios = [max(areas) / statistics.fmean(areas) for areas in zip(*area["area"], strict=True)]
        imbalance = statistics.median(ratios) if cell.replay.rank is None else None
        return replace(parts[0], **area, imbalance=imbalance)


FACTS = DocumentsFacts()
