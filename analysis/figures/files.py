"""The files of all figures. Imports matplotlib only to draw."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from analysis.cells.equivalence import Comparison
from analysis.cells.selection import Selection
from analysis.figures.figure_file import FigureFile

Draw = Callable[[str], FigureFile]
"""Draws the figure of this name and writes its files."""


def figure_writer(
    drawn: Selection, folder: Path, compared: Sequence[Comparison] = (), other: Executor | None = None
) -> Callable[[], list[FigureFile]]:
    """What writes every figure of these cells into the folder, those of trainings that are compared first.

    An `other` process, where there is one, begins at once with the first figure, and what is called with the
    last, until they meet.
    """
    from analysis.figures.drawing import write_figure
    from analysis.figures.equivalence import write_equivalence
    from analysis.figures.figures import figures_for

    folder.mkdir(exist_ok=True)
    draw = partial(write_figure, drawn=drawn, folder=folder)
    names = figures_for(drawn.cells)
    waiting = deque(names)
    there = ThreadPoolExecutor(1).submit(_drawn, waiting.popleft, _sent(other, draw)) if other else None

    def write() -> list[FigureFile]:
        losses = write_equivalence(compared, folder, drawn.cells.banner)
        by_name = _drawn(waiting.pop, draw) | (there.result() if there else {})
        return [*losses, *map(by_name.__getitem__, names)]

    return write


def _sent(other: Executor, draw: Draw) -> Draw:
    """Draws there, one at a time: of what an executor was sent for its process nothing can be taken back."""
    return lambda name: other.submit(draw, name).result()


def _drawn(take: Callable[[], str], draw: Draw) -> dict[str, FigureFile]:
    """Figure by figure what is taken, until nothing is left."""
    return {name: draw(name) for name in _until_empty(take)}


def _until_empty(take: Callable[[], str]) -> Iterator[str]:
    while True:
        try:
            name = take()
        except IndexError:
            return
        yield name
