"""The data that the sections of a report show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from analysis.answers.loss_agreement import with_equivalence
from analysis.answers.next_steps import deciding_command
from analysis.answers.score_agreement import with_scores
from analysis.answers.verdict import Verdict, verdict
from analysis.cells.cells import Cells
from analysis.cells.equivalence import LOSS_EQUIVALENCE, LossComparison, loss_comparisons
from analysis.cells.quality import ScoredCell, scored_cells
from analysis.cells.selection import Selection, select_for_figures, select_for_pages
from analysis.read.archive import Archive
from analysis.show.columns import DISPENSABLE, columns_of, named_rows
from analysis.show.section import FigureFile, Table
from bench.measure.quality.section import EXPERIMENT as QUALITY
from bench.record.record import Role

ROLES_WITHOUT_RESULT = (Role.CONTROL, Role.INJECTED_FAULT, Role.TRAINING)
"""Roles of cells whose speed and memory are no results."""


@dataclass(frozen=True, eq=False, slots=True)
class Findings:
    """Records of a report and everything computed from them."""

    archive: Archive
    """Records of the report; the origins that `--mix` names are made equal."""
    cells: Cells
    """Cells whose speed and memory are results: no controls, no injected faults."""
    shown: Selection
    """Cells that the tables list."""
    shown_rows: Sequence[Mapping[Any, Any]]
    """Rows of the listed cells, with names."""
    cell_table: Table
    """Table of the listed cells with the columns of all views."""
    comparisons: Sequence[LossComparison]
    """Trainings compared with data parallelism; trainings of equal work share a comparison."""
    scored_cells: Sequence[ScoredCell]
    """Cells of `experiment=quality` that score a model."""
    verdict: Verdict
    """Answer of the sweep, in sentences."""
    drawn: Selection
    """Cells that figures show."""
    figures: Sequence[FigureFile] = ()

    @classmethod
    def from_archive(cls, archive: Archive, origins: Sequence[str] = ()) -> Self:
        """Return the findings, without figures.

        Args:
            archive: Records of the report.
            origins: Sentences on records of different code, torch or device.
        """
        frame = archive.frame
        cells, compared = (
            Cells.of_records(frame[~frame["role"].isin(ROLES_WITHOUT_RESULT)]),
            loss_comparisons(archive),
        )
        shown = select_for_pages(cells)
        rows = named_rows(shown.cells)
        answer = verdict(cells, deciding_command(archive))
        answer = replace(answer, origins=[*origins])
        scored = scored_cells(archive)
        answer = with_scores(answer, scored, alone=bool(frame["experiment"].eq(QUALITY).all()))
        alone = bool(frame["experiment"].eq(LOSS_EQUIVALENCE).all())
        return cls(
            archive=archive,
            cells=cells,
            shown=shown,
            shown_rows=rows,
            cell_table=Table.from_items(columns_of(shown.cells), rows, DISPENSABLE),
            comparisons=compared,
            scored_cells=scored,
            verdict=with_equivalence(answer, compared, alone=alone),
            drawn=select_for_figures(cells),
        )
