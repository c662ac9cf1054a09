"""Figures, painted by processes of their own while somebody else writes the rest of the report."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Self

from analysis.cells.selection import Selection
from analysis.figures.picture import Picture


class Painters(AbstractContextManager["Painters"]):
    """`count` processes that paint, or none: then whoever asks does it at once."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pool = ProcessPoolExecutor(count, multiprocessing.get_context("fork")) if count else None

    def __enter__(self) -> Self:
        if self._pool is not None:
            for _ in range(self.count):
                self._pool.submit(_fetch_brushes)
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def paint(self, drawn: Selection, folder: Path) -> Callable[[], Sequence[Picture]]:
        """Write every figure of these cells into the folder; what comes back waits for all of them."""
        folder.mkdir(exist_ok=True)
        if self._pool is None:
            painted = paint(drawn, folder)
            return lambda: [*painted.values()]
        parts = [self._pool.submit(paint, drawn, folder, part, self.count) for part in range(self.count)]

        def pictures() -> Sequence[Picture]:
            numbered = {number: each for part in parts for number, each in part.result().items()}
            return [numbered[number] for number in sorted(numbered)]

        return pictures


def paint(drawn: Selection, folder: Path, part: int = 0, parts: int = 1) -> dict[int, Picture]:
    """Write the figures of these cells whose number leaves `part` when divided by `parts`; by number."""
    from analysis.figures.drawing import write_figure
    from analysis.figures.figures import figures_for

    return {
        number: write_figure(name, drawn, folder)
        for number, name in enumerate(figures_for(drawn.cells))
        if number % parts == part
    }


def _fetch_brushes() -> None:
    """Import matplotlib, which takes a third of a second, while there is nothing to paint yet."""
    import analysis.figures.drawing  # noqa: F401
