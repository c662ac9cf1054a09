"""Colour, marker and line of a strategy in figures, without matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Line = Literal["-", "--", "-.", ":"]
"""Line style: solid for local and Ulysses, dashed for rings, dash-dotted for hybrids, dotted for others."""
FILLED_MARKERS = "ov^<>8sp*hHDdPX"
MIN_CORNERS = 3


@dataclass(frozen=True, slots=True)
class PlotStyle:
    """Colour, marker and line of one strategy, the same in every figure of every sweep.

    Built-in strategies have the colours of Okabe and Ito, which colour-blind readers can tell apart (grey
    instead of pale yellow), and the muted colours of Paul Tol. No two of them have the same marker.

    For example `PlotStyle("#4B0082", "s", "--")`, or `PlotStyle("#4B0082", (5, 1, 0))` for a star of five
    corners.
    """

    color: str
    """Colour as `#` and six hexadecimal digits, such as `#0072B2`."""
    marker: str | tuple[int, int, int]
    """One of FILLED_MARKERS, or (corners, 0 for a polygon or 1 for a star, rotation in degrees).

    A marker must have an inside, because filled and empty markers distinguish settings of one strategy.
    """
    line: Line = "-"
    """Line style of matplotlib."""

    @property
    def color_and_marker(self) -> tuple[str, str | tuple[int, int, int]]:
        """Colour and marker, a pair that no two strategies of a figure may share."""
        return self.color.upper(), self.marker

    def faults(self) -> Iterator[str]:
        """Yield the invalid values, each as the end of a sentence whose subject is the facts' class."""
        if not re.fullmatch(r"#[0-9a-fA-F]{6}", self.color):
            yield f"has a style of color={self.color!r}; it must be six hexadecimal digits, such as '#0072B2'"
        if self.marker not in [*FILLED_MARKERS] and not _is_polygon_or_star(self.marker):
            known = f"{', '.join(FILLED_MARKERS)}, or a star such as (5, 1, 0)"
            yield f"has a style of marker={self.marker!r}; it must be one of {known}"
        if self.line not in get_args(Line):
            yield f"has a style of line={self.line!r}; it must be one of {', '.join(get_args(Line))}"


def _is_polygon_or_star(marker: object) -> bool:
    match marker:
        case tuple((int(corners), 0 | 1, int())):
            return corners >= MIN_CORNERS
    return False
