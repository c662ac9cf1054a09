"""The files of all figures, written at once or by processes of their own. Imports matplotlib only to draw."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from analysis.cells.selection import Selection


@dataclass(frozen=True, slots=True)
class FigureFile:
    """One figure as the page shows it, which needs no file beside the page."""

    title: str
    alternative: str
    """For readers who cannot see it."""
    address: str
    """The figure itself, as a data address."""


class DrawingProcesses(AbstractContextManager["DrawingProcesses"]):
    """`count` processes that draw, or none: then whoever asks does it at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork")) if count else None

    def __enter__(self) -> Self:
        if self._pool is not None:
            for _ in range(self.count):
                self._pool.submit(_import_matplotlib)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def write(self, drawn: Selection, folder: Path) -> Callable[[], Sequence[FigureFile]]:
        """Write every figure of these cells into the folder; what comes back waits for all of them."""
        folder.mkdir(exist_ok=True)
        if self._pool is None:
            written = write_figures(drawn, folder)
            return lambda: [*written.values()]
        parts = [
            self._pool.submit(write_figures, drawn, folder, part, self.count) for part in range(self.count)
        ]

        def figure_files() -> Sequence[FigureFile]:
            numbered = {number: each for part in parts for number, each in part.result().items()}
            return [numbered[number] for number in sorted(numbered)]

        return figure_files


def write_figures(drawn: Selection, folder: Path, part: int = 0, parts: int = 1) -> dict[int, FigureFile]:
    """Write the figures of these cells whose number leaves `part` when divided by `parts`; by number."""
    from analysis.figures.drawing import write_figure
    from analysis.figures.figures import figures_for

    return {
        number: write_figure(name, drawn, folder)
        for number, name in enumerate(figures_for(drawn.cells))
        if number % parts == part
    }


def _import_matplotlib() -> None:
    """Takes a third of a second, while there is nothing to draw yet."""
    import analysis.figures.drawing  # noqa: F401
