"""The files of all figures. Imports matplotlib only to draw."""

from __future__ import annotations

from pathlib import Path

from analysis.cells.selection import Selection
from analysis.figures.figure_file import FigureFile


def write_figures(drawn: Selection, folder: Path) -> list[FigureFile]:
    """Write every figure of these cells into the folder."""
    from analysis.figures.drawing import write_figure
    from analysis.figures.figures import figures_for

    folder.mkdir(exist_ok=True)
    return [write_figure(name, drawn, folder) for name in figures_for(drawn.cells)]
