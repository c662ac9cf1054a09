"""One figure as the page shows it. Needs no matplotlib."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spot:
    """What a reader can point at: a rectangle in thousandths of the drawing's width, from its top left."""

    left: int
    top: int
    width: int
    height: int
    text: str
    """The cell, its value, how sure it is, and its status."""


@dataclass(frozen=True, slots=True)
class Drawing:
    """A figure drawn once."""

    address: str
    """The picture itself, as a data address."""
    height: int
    """In thousandths of its width."""
    spots: tuple[Spot, ...] = ()


@dataclass(frozen=True, slots=True)
class FigureFile:
    """One figure of the report."""

    title: str
    alternative: str
    """For readers who cannot see it."""
    wide: Drawing
    narrow: Drawing
    """The same for narrow screens, with its own aspect ratio."""
