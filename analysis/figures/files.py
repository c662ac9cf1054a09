"""The files of all figures. Imports matplotlib only to draw."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from analysis.cells.selection import Selection


@dataclass(frozen=True, slots=True)
class FigureFile:
    """One figure as the page shows it, which needs no file beside the page."""

    title: str
    alternative: str
    """For readers who cannot see it."""
    address: str
    """The figure itself, as a data address."""


def write_figures(drawn: Selection, folder: Path) -> list[FigureFile]:
    """Write every figure of these cells into the folder."""
    from analysis.figures.drawing import write_figure
    from analysis.figures.figures import figures_for

    folder.mkdir(exist_ok=True)
    return [write_figure(name, drawn, folder) for name in figures_for(drawn.cells)]
