"""The colour, mark and line of a strategy in figures. Imports no matplotlib."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Line = Literal["-", "--", "-.", ":"]
"""Line of a strategy here: solid for local and Ulysses, dashed for a ring, dash-dotted for both, else dotted.

Colours here are first those of Okabe and Ito, which colour-blind readers can tell apart (grey for their too
pale yellow), then the muted ones of Paul Tol. No two strategies have the same marker.
"""
FILLED_MARKERS = "ov^<>8sp*hHDdPX"
LEAST_CORNERS = 3


@dataclass(frozen=True, slots=True)
class PlotStyle:
    """One strategy's colour, mark and line, the same in every figure of every sweep."""

    color: str
    """Six hexadecimal digits: `#0072B2`."""
    marker: str | tuple[int, int, int]
    """One of FILLED_MARKERS, or (corners, 0 for a polygon or 1 for a star, degrees that it is turned by).

    Markers have an inside, as how it is filled tells settings of one strategy apart.
    """
    line: Line = "-"

    @property
    def color_and_marker(self) -> tuple[str, str | tuple[int, int, int]]:
        """Return what must differ between two strategies of a figure."""
        return self.color.upper(), self.marker

    def faults(self) -> Iterator[str]:
        """Yield what figures could not draw, as the end of a sentence about a class of a package."""
        if not re.fullmatch(r"#[0-9a-fA-F]{6}", self.color):
            yield f"has a style of color={self.color!r}; it has to be six hexadecimal digits: '#0072B2'"
        if self.marker not in [*FILLED_MARKERS] and not _is_polygon_or_star(self.marker):
            known = f"{', '.join(FILLED_MARKERS)}, or a star such as (5, 1, 0)"
            yield f"has a style of marker={self.marker!r}; it has to be one of {known}"
        if self.line not in get_args(Line):
            yield f"has a style of line={self.line!r}; it has to be one of {', '.join(get_args(Line))}"


def _is_polygon_or_star(marker: object) -> bool:
    match marker:
        case tuple((int(corners), 0 | 1, int())):
            return corners >= LEAST_CORNERS
    return False
