"""A whole figure around its axes: what was measured above it, the legend below it, and its two files."""

from __future__ import annotations

import base64
import io
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from analysis.cells.cells import Cells
from analysis.cells.selection import Selection
from analysis.figures.failures import ROW_INCHES, lane_lines
from analysis.figures.figure_file import Drawing, FigureFile, Spot
from analysis.figures.figures import FIGURES, Handle, legend_entries
from analysis.figures.quantity import Area
from analysis.figures.style import BANNER_COLOR, MUTED_COLOR, NARROW_BELOW_INCHES
from bench.store import write_whole

WIDTH_INCHES = 6.4
"""At 1400 px a page has two figures in a row; as wide as this their smallest text is 11 px high."""
NARROW_INCHES = 3.4
"""The same at 390 px, where a figure is as wide as the page."""
LINE_INCHES = 0.175
X_AXIS_INCHES = 0.45
"""What stands below the axes of the last panel."""
LEGEND_INCHES = 0.25
"""A legend may be so much wider than a line of the header: it begins left of the axes."""
LETTERS_PER_INCH = 16.5
AXIS_INCHES = 1.05
"""What stands on the left of the axes, where a header begins."""
BESIDE_ROWS = 0.62
"""Where the names of rows stand on the left, the header begins right of them: its part of the width."""
LETTERS_PER_HANDLE = 8
DPI = 150
POINT_REACH = 10
"""In thousandths of a figure's width: a little more than half of a marker."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A figure with its panels below one another, and room for what stands above and below them."""

    figure: Figure
    panels: Sequence[Axes]
    title: str
    lines: Sequence[tuple[str, str]]
    """Under the title, with their colours."""
    panel_inches: float
    """All panels together, with their ticks and labels."""

    def finish(self, entries: Mapping[str, Handle]) -> Figure:
        """The figure with header and legend, laid out once and not again for each of its files."""
        width = float(self.figure.get_size_inches()[0])
        columns, legend_rows = _legend_shape([*entries], letters_in(width + LEGEND_INCHES))
        header, legend = _header_inches(self.lines), LINE_INCHES * (legend_rows + 1)
        height = header + self.panel_inches + legend
        self.figure.set_size_inches(width, height)
        layout = ConstrainedLayoutEngine(rect=(0, legend / height, 1, self.panel_inches / height))
        layout.execute(self.figure)
        _write_header(self.figure, self.panels[0], self.title, self.lines)
        _write_legend(self.figure, entries, columns, legend / 2 / height)
        return self.figure


def letters_in(inches: float) -> int:
    """How many letters of a figure's small text stand in a line of this width."""
    return int(LETTERS_PER_INCH * (inches - AXIS_INCHES))


def framed(
    title: str, lines: Sequence[tuple[str, str]], panel_inches: Sequence[float], width: float = WIDTH_INCHES
) -> Frame:
    """An empty figure with panels of these heights, in inches as its width."""
    header, inches = _header_inches(lines), sum(panel_inches) + X_AXIS_INCHES
    height = header + inches + LINE_INCHES
    figure = Figure(figsize=(width, height), dpi=DPI)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(
        len(panel_inches), 1, height_ratios=panel_inches, top=1 - header / height,
        bottom=(LINE_INCHES + X_AXIS_INCHES) / height,
    )  # fmt: skip
    panels = [figure.add_subplot(grid[row]) for row in range(len(panel_inches))]
    return Frame(figure, panels, title, lines, inches)


def _header_inches(lines: Sequence[tuple[str, str]]) -> float:
    return LINE_INCHES * (len(lines) + 2)


def build_figure(name: str, cells: Cells, note: str | None = None, width: float = WIDTH_INCHES) -> Figure:
    """The figure of this name in FIGURES, complete; `note` says which cells are left out."""
    kind, narrow = FIGURES[name], width < NARROW_BELOW_INCHES
    letters = letters_in(width if kind.against or narrow else BESIDE_ROWS * width)
    lines = header_lines(cells.subtitle, kind.reading_of(cells), note, cells.banner, letters)
    inches = kind.inches(cells) * (kind.narrow_lines if narrow else 1)
    lane = ROW_INCHES * lane_lines(kind.marks(cells), narrow=narrow)
    frame = framed(kind.title_of(cells), lines, [inches + lane], width)
    (axes,) = frame.panels
    axes.set_ylabel(kind.y_label_of(cells))
    kind.draw(cells, axes)
    return frame.finish(legend_entries(axes))


def png_bytes(figure: Figure) -> bytes:
    """The figure as PNG, with the texts as they were measured for the layout."""
    buffer = io.BytesIO()
    # savefig would draw it twice, once only to lay it out
    figure.canvas.print_png(buffer, metadata={"Software": None})  # type: ignore[attr-defined]
    return buffer.getvalue()


def svg_bytes(figure: Figure) -> bytes:
    """The figure as SVG; the same figure gives the same bytes."""
    buffer, measuring = io.StringIO(), figure.canvas
    with mpl.rc_context({"svg.hashsalt": "analysis"}):
        canvas = FigureCanvasSVG(figure)
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    figure.set_canvas(measuring)
    figure.set_dpi(DPI)  # which printing made 72
    svg = buffer.getvalue().encode()
    # matplotlib names clip paths after memory addresses
    for number, name in enumerate(dict.fromkeys(re.findall(rb'<clipPath id="(\w+)"', svg))):
        svg = svg.replace(name, b"clip%d" % number)
    return svg


def write_figure(name: str, drawn: Selection, folder: Path) -> FigureFile:
    """The figure as PNG and SVG in the folder, and as the page shows it."""
    kind, cells = FIGURES[name], drawn.cells
    title = kind.title_of(cells)
    name_in_full = f"{title} against {kind.against}" if kind.against else title
    figures = Figures(
        *(build_figure(name, cells, drawn.note, each) for each in (WIDTH_INCHES, NARROW_INCHES))
    )
    areas = [*kind.areas(cells)]
    narrow_areas = areas if kind.narrow_areas is None else [*kind.narrow_areas(cells)]
    file = save(figures, folder / name, title, f"{name_in_full}. {kind.reading_of(cells)}.")
    return replace(
        file,
        wide=replace(file.wide, spots=spots_of(figures.wide, areas)),
        narrow=replace(file.narrow, spots=spots_of(figures.narrow, narrow_areas)),
    )


@dataclass(frozen=True, slots=True)
class Figures:
    """The same figure for wide and for narrow screens."""

    wide: Figure
    narrow: Figure


def save(figures: Figures, place: Path, title: str, alternative: str) -> FigureFile:
    """Write a figure as PNG and SVG; the page shows it, and `alternative` to readers who cannot see it."""
    svg = write_files(figures.wide, place)
    wide, narrow = _drawing(figures.wide, svg), _drawing(figures.narrow, svg_bytes(figures.narrow))
    return FigureFile(title, alternative, wide, narrow)


def write_files(figure: Figure, place: Path) -> bytes:
    """Write a figure as PNG and SVG; the latter comes back."""
    svg = svg_bytes(figure)
    write_whole(place.with_name(f"{place.name}.png"), png_bytes(figure))
    write_whole(place.with_name(f"{place.name}.svg"), svg)
    return svg


def _drawing(figure: Figure, svg: bytes) -> Drawing:
    return Drawing(data_address(svg), _thousandths_high(figure))


def _thousandths_high(figure: Figure) -> int:
    width, height = map(float, figure.get_size_inches())
    return round(1000 * height / width)


def spots_of(figure: Figure, areas: Sequence[Area]) -> tuple[Spot, ...]:
    """Where these areas of the first panel's data stand in the figure; a point reaches POINT_REACH around."""
    axes, high = figure.axes[0], _thousandths_high(figure)
    if not areas:
        return ()
    corners = [corner for area in areas for corner in zip(area.x, area.y, strict=True)]
    places = figure.transFigure.inverted().transform(axes.transData.transform(corners)) * [1000, high]
    spots = []
    for area, (one, other) in zip(areas, places.reshape(-1, 2, 2), strict=True):
        is_point = area.x[0] == area.x[1]
        reach = POINT_REACH if is_point else 0
        left, right = sorted((one[0], other[0]))
        bottom, top = sorted((one[1], other[1]))
        spots.append(
            Spot(
                round(left - reach), round(high - top - reach),
                max(1, round(right - left + 2 * reach)), max(1, round(top - bottom + 2 * reach)), area.text,
            )
        )  # fmt: skip
    return tuple(spots)


def data_address(svg: bytes) -> str:
    """An SVG as an address that needs no file."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def header_lines(
    subtitle: str,
    reading: str,
    note: str | None,
    warning: str | None,
    letters: int = letters_in(WIDTH_INCHES),
) -> list[tuple[str, str]]:
    """The lines under the title with their colours."""
    lines = [(line, "black") for line in textwrap.wrap(subtitle, letters)]
    lines += [(line, MUTED_COLOR) for line in textwrap.wrap(reading, letters)]
    lines += [(line, BANNER_COLOR) for line in textwrap.wrap(note or "", letters)]
    return lines + [(line, BANNER_COLOR) for line in textwrap.wrap(warning or "", letters)]


def _write_header(figure: Figure, panel: Axes, title: str, lines: Sequence[tuple[str, str]]) -> None:
    """From the left end of the panel's axes."""
    width, height = map(float, figure.get_size_inches())
    left = panel.get_position().x0
    size = 11 if width < NARROW_BELOW_INCHES else 13
    figure.text(left, 1 - 0.8 * LINE_INCHES / height, title, size=size, weight="bold", va="center")
    for number, (text, color) in enumerate(lines):
        y = 1 - (number + 2) * LINE_INCHES / height
        figure.text(left, y, text, size=8, color=color, va="center")


def _write_legend(figure: Figure, entries: Mapping[str, Handle], columns: int, middle: float) -> None:
    """In the middle of the figure: axes with names of rows on their left may be narrower than a legend."""
    if entries:
        figure.legend(  # type: ignore[call-overload]  # whose handles may be containers too
            entries.values(), entries.keys(), loc="center", bbox_to_anchor=(0.5, middle), ncols=columns,
            fontsize=8, frameon=False,
        )  # fmt: skip


def _legend_shape(labels: list[str], letters_per_line: int) -> tuple[int, int]:
    """Columns and rows of a legend whose longest label still fits."""
    letters = [len(label) + LETTERS_PER_HANDLE for label in labels] or [1]
    fits_one_row = sum(letters) <= letters_per_line
    columns = max(1, len(labels) if fits_one_row else letters_per_line // max(letters))
    return columns, -(-len(labels) // columns)
