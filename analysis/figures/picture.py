"""A figure as the page shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Picture:
    """One figure as an address that needs no file beside the page."""

    title: str
    alternative: str
    address: str
