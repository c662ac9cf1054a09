"""One figure as the page shows it. Needs no matplotlib."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FigureFile:
    """One figure of the report."""

    name: str
    """Of its files in figures/, without the ending."""
    title: str
    caption: str
    """What a point is, and what a reader must know of these cells: sentences."""
    svg: str
    """The picture with what can be pointed at, as a part of the page."""
