"""The files of all figures. Imports matplotlib only to draw."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from pathlib import Path

from analysis.cells.equivalence import Comparison
from analysis.cells.selection import Selection
from analysis.figures.figure_file import FigureFile


def figure_writer(
    drawn: Selection, folder: Path, compared: Sequence[Comparison] = (), other: Executor | None = None
) -> Callable[[], list[FigureFile]]:
    """What writes every figure of these cells into the folder, those of trainings that are compared first.

    An `other` process, where there is one, begins at once; what is called draws those that it has not begun.
    """
    from analysis.figures.drawing import write_figure
    from analysis.figures.equivalence import write_equivalence
    from analysis.figures.figures import figures_for

    folder.mkdir(exist_ok=True)
    names = figures_for(drawn.cells)
    begun = {name: other.submit(write_figure, name, drawn, folder) for name in names} if other else {}

    def write() -> list[FigureFile]:
        losses = write_equivalence(compared, folder, drawn.cells.banner)
        here = {
            name: write_figure(name, drawn, folder)
            for name in reversed(names)  # the other process began with the first
            if name not in begun or begun[name].cancel()
        }
        return [*losses, *(here[name] if name in here else begun[name].result() for name in names)]

    return write
