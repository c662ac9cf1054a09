"""A figure as the page shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FigureFile:
    """One figure as the page shows it, which needs no file beside the page."""

    title: str
    alternative: str
    """For readers who cannot see it."""
    address: str
    """The figure itself, as a data address."""
    narrow: str | None = None
    """The same drawn for narrow screens, with its own aspect ratio; None where it was drawn once."""
