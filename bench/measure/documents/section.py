"""Section of the documents pass: attention pairs within packed documents, and their balance. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Self

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
    """(Query, key, head) triples of one layer that a rank computes, by rank and step; empty if unknown."""
    imbalance: float | None = 1.0
    """Median over the steps of the busiest rank's area divided by the mean area of all ranks. Ranks wait for
    the busiest in every step. Null for a replay, which has one rank, and if `area` is unknown."""

    @classmethod
    def from_positions(cls, rows: Iterable[Iterable[int]], micro_steps: int) -> Self:
        """Return the section of one step of a loop, whose padding and areas by rank are unknown.

        Args:
            rows: Positions within their document, from 0, of all tokens of one micro-step on all ranks, in
                any order.
            micro_steps: Number of micro-steps, which count alike.
        """
        positions = [*chain.from_iterable(rows)]
        pairs = [micro_steps * sum(position + 1 for position in positions)]
        documents = [micro_steps * positions.count(0)]
        return cls(documents=documents, pairs=pairs, computed_pairs=pairs, area=[], imbalance=None)


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
