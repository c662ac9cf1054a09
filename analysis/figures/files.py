"""The files of all figures. Imports matplotlib only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.cells.equivalence import Comparison
from analysis.cells.selection import Selection
from analysis.figures.figure_file import FigureFile


def write_figures(drawn: Selection, folder: Path, compared: Sequence[Comparison] = ()) -> list[FigureFile]:
    """Write every figure of these cells into the folder, and first those of trainings that are compared."""
    from analysis.figures.drawing import write_figure
    from analysis.figures.equivalence import write_equivalence
    from analysis.figures.figures import figures_for

    folder.mkdir(exist_ok=True)
    cells = drawn.cells
    losses = write_equivalence(compared, folder, cells.banner)
    return [*losses, *(write_figure(name, drawn, folder) for name in figures_for(cells))]
