"""The files of all figures. Imports matplotlib only to draw."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from analysis.cells.equivalence import Comparison
from analysis.cells.selection import Selection
from analysis.figures.figure_file import FigureFile


def prepare_to_draw() -> None:
    """Import what draws, which takes half a second."""
    import analysis.figures.drawing
    import analysis.figures.equivalence
    import analysis.figures.figures  # noqa: F401


def write_figures(
    drawn: Selection, folder: Path, compared: Sequence[Comparison] = (), *, part: int = 0, of: int = 1
) -> list[FigureFile]:
    """Write every figure of these cells into the folder, and first those of trainings that are compared.

    Or a `part` of so many, from 0: of all parts the first has the first figures.
    """
    from analysis.figures.drawing import write_figure
    from analysis.figures.equivalence import write_equivalence
    from analysis.figures.figures import figures_for

    folder.mkdir(exist_ok=True)
    cells = drawn.cells
    names = figures_for(cells)
    names = names[part * len(names) // of : (part + 1) * len(names) // of]
    losses = write_equivalence(compared, folder, cells.banner) if part == 0 else []
    return [*losses, *(write_figure(name, drawn, folder) for name in names)]
