"""All that the sections of a report show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from analysis.answers.loss_agreement import with_equivalence
from analysis.answers.next_steps import deciding_command, kernel_lines
from analysis.answers.verdict import Verdict, verdict
from analysis.cells.cells import Cells
from analysis.cells.equivalence import EXPERIMENT as LOSS_EQUIVALENCE
from analysis.cells.equivalence import Comparison, comparisons
from analysis.cells.selection import Selection, for_figures, for_pages
from analysis.read.archive import Archive
from analysis.show.columns import DISPENSABLE, columns_of, named_rows
from analysis.show.section import FigureFile, Table
from bench.record.record import Role

NO_ANSWERS = (Role.CONTROL, Role.INJECTED_FAULT)
"""Roles whose speed and memory answer nothing."""


@dataclass(frozen=True, eq=False, slots=True)
class Findings:
    """Records of a report and all that follows from them, each computed once."""

    archive: Archive
    """Records, with those made equal that `--mix` names."""
    cells: Cells
    """Cells whose speed and memory answer something."""
    shown: Selection
    """Cells that the tables of cells list."""
    shown_rows: Sequence[Mapping[Any, Any]]
    """Rows of the listed cells, each with its name."""
    cell_table: Table
    """Table of the listed cells, in every view's columns."""
    comparisons: Sequence[Comparison]
    """Trainings compared with data parallelism, by work."""
    verdict: Verdict
    """Answer in sentences."""
    drawn: Selection
    """Cells that figures show."""
    figures: Sequence[FigureFile] = ()

    @classmethod
    def of(cls, archive: Archive, origins: Sequence[str] = ()) -> Self:
        """Return the findings without figures; `origins` are sentences on which records count."""
        frame = archive.frame
        cells, compared = Cells.of_records(frame[~frame["role"].isin(NO_ANSWERS)]), comparisons(archive)
        shown = for_pages(cells)
        rows = named_rows(shown.cells)
        found = verdict(cells, deciding_command(archive))
        found = replace(found, origins=[*origins], kernels=kernel_lines(archive))
        alone = bool(frame["experiment"].eq(LOSS_EQUIVALENCE).all())
        return cls(
            archive=archive,
            cells=cells,
            shown=shown,
            shown_rows=rows,
            cell_table=Table.of(columns_of(shown.cells), rows, DISPENSABLE),
            comparisons=compared,
            verdict=with_equivalence(found, compared, alone=alone),
            drawn=for_figures(cells),
        )
