"""The frame of a figure: heading, panels, legend, areas that show a value on hover, and its files."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import matplotlib as mpl
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.container import BarContainer, ErrorbarContainer
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.textpath import TextPath

from analysis.show.figures.style import BANNER_COLOR, MUTED_COLOR, RC
from analysis.show.section import FigureFile
from bench.record.store import write_atomically

WIDTH_INCHES = 4.4
"""Width of a figure: a page of 390 px shows 9 pt as 10 px; in a paper it is one and a half columns wide."""
AXES_INCHES = 2.5
DPI = 200
POINTS_PER_INCH = 72
MARGIN_INCHES = 0.05
TITLE_INCHES, LINE_INCHES = 0.24, 0.165
X_LABELS_INCHES = 0.5
"""First estimate of the height of ticks and labels below the axes."""
HANDLE_INCHES = 0.6
"""Width of a legend without its labels."""
MAX_COLUMNS = 4
HOVER_RADIUS_POINTS = 5
"""Distance from a point at which its value is shown, a little more than half of a marker."""
Handle = Line2D | ErrorbarContainer | BarContainer
"""Artist that a legend can show."""


@dataclass(frozen=True, slots=True)
class Heading:
    """Lines above the axes."""

    title: str
    subtitle: str
    """Provenance, model, settings, device and number of ranks."""
    caveat: str | None = None


@dataclass(frozen=True, slots=True)
class HoverArea:
    """Area of some axes, in data coordinates, that shows a text on hover."""

    axes: Axes
    x: tuple[float, float]
    """Left and right edge; equal for a point."""
    y: tuple[float, float]
    """Lower and upper edge; equal for a point."""
    text: str


@dataclass(frozen=True, slots=True)
class FittedText:
    """Text that shrinks until it is no wider than a share, 0..1, of its container."""

    text: Text
    container: Artist
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Sheet:
    """A figure while it is drawn."""

    figure: Figure
    panels: Sequence[Axes]
    """Panels from top to bottom, row by row."""
    inches: Sequence[float]
    """Height of each row of panels."""
    heading: Heading
    columns: int = 1
    """Number of panels in each row."""
    hover_areas: list[HoverArea] = field(default_factory=list)
    """Areas that show a value on hover."""
    remarks: list[str] = field(default_factory=list)
    """Sentences about these cells for the end of the caption."""
    fitted: list[FittedText] = field(default_factory=list)
    """Texts that shrink after the layout."""

    @property
    def axes(self) -> Axes:
        """Lowest panel, on which most figures draw."""
        return self.panels[-1]

    def add_hover_point(self, x: float, y: float, text: str) -> None:
        """Show a text when the pointer is on this point of the lowest panel."""
        self.hover_areas.append(HoverArea(self.axes, (x, x), (y, y), text))


def new_sheet(heading: Heading, inches: Sequence[float] = (AXES_INCHES,), columns: int = 1) -> Sheet:
    """Return a figure with empty panels: a row for each height in `inches`, with `columns` panels each."""
    figure = Figure(figsize=(WIDTH_INCHES * columns, sum(inches)), dpi=DPI)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(inches), columns, height_ratios=inches)
    panels = [figure.add_subplot(grid[number]) for number in range(len(inches) * columns)]
    return Sheet(figure, panels, inches, heading, columns)


def complete_sheet(draw: Callable[[], Sheet]) -> Sheet:
    """Call `draw` in the style of all figures, add heading and legend, and lay out the figure."""
    with mpl.rc_context(RC):
        sheet = draw()
        _lay_out(sheet, _add_legend(sheet))
        _write_heading(sheet)
        for fitted in sheet.fitted:
            shrink_to_fit(fitted)
    return sheet


def legend_entries(sheet: Sheet) -> dict[str, Handle]:
    """Return the handles of the legend by label."""
    return {
        label: handle
        for axes in sheet.panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        if isinstance(handle, Handle)
    }


def _add_legend(sheet: Sheet) -> float:
    """Add the legend below the axes, with as many columns as fit, and return its height in inches."""
    entries, label_inches = legend_entries(sheet), WIDTH_INCHES * sheet.columns - HANDLE_INCHES
    for columns in range(min(MAX_COLUMNS * sheet.columns, len(entries)), 0, -1):
        labels = [wrap_label(label, label_inches) if columns == 1 else label for label in entries]
        legend = sheet.figure.legend(  # type: ignore[call-overload]  # handles may also be containers
            entries.values(), labels, loc="outside lower center", ncols=columns, columnspacing=1.2
        )
        box = legend.get_window_extent()
        if columns == 1 or box.width <= sheet.figure.bbox.width:
            return float(box.height) / sheet.figure.dpi
        legend.remove()
    return 0.0


def wrap_label(label: str, max_inches: float) -> str:
    """Break a label after commas into lines that are no wider than `max_inches`, if possible."""
    lines = [""]
    for part in label.split(", "):
        longer = f"{lines[-1]}, {part}" if lines[-1] else part
        fits = not lines[-1] or text_inches(longer) <= max_inches
        lines[-1:] = [longer] if fits else [lines[-1], part]
    return ",\n".join(lines)


def text_inches(text: str, size: float = RC["font.size"]) -> float:
    """Return the width of a text in inches; `size` is the font size in points."""
    return float(TextPath((0, 0), text, size=size).get_extents().width) / POINTS_PER_INCH


def _lay_out(sheet: Sheet, legend_inches: float) -> None:
    """Apply constrained layout and make the figure as high as the heights of its panels require."""
    figure = sheet.figure
    heading = TITLE_INCHES + LINE_INCHES * (2 if sheet.heading.caveat else 1) + MARGIN_INCHES
    width, height = (float(inches) for inches in figure.get_size_inches())
    height += heading + legend_inches + X_LABELS_INCHES
    for _ in range(3):
        figure.set_size_inches(width, height)
        rect = (0, 0, 1, 1 - heading / height)
        ConstrainedLayoutEngine(rect=rect, w_pad=MARGIN_INCHES, h_pad=MARGIN_INCHES, hspace=0).execute(figure)
        panel_inches = sum(axes.bbox.height for axes in sheet.panels[:: sheet.columns]) / figure.dpi
        height += sum(sheet.inches) - panel_inches


def _write_heading(sheet: Sheet) -> None:
    """Write title, subtitle and caveat from the left edge; lines that are too long get a smaller font."""
    figure, heading = sheet.figure, sheet.heading
    width, height = (float(inches) for inches in figure.get_size_inches())
    left, y = MARGIN_INCHES / width, height - TITLE_INCHES / 2 - MARGIN_INCHES
    title = figure.text(left, y / height, heading.title, size=11, weight="bold", va="center")
    shrink_to_fit(FittedText(title, figure))
    lines = [(heading.subtitle, MUTED_COLOR), (heading.caveat or "", BANNER_COLOR)]
    y -= (TITLE_INCHES - LINE_INCHES) / 2
    for line, color in lines:
        y -= LINE_INCHES
        text = figure.text(left, y / height, line, size=8.5, color=color, va="center")
        shrink_to_fit(FittedText(text, figure))


def shrink_to_fit(fitted: FittedText) -> None:
    """Reduce the font size of a text that is wider than its share of the container."""
    text, figure = fitted.text, fitted.text.get_figure(root=True)
    if figure is None or not text.get_text():
        return
    width = fitted.share * fitted.container.get_window_extent().width - 2 * MARGIN_INCHES * figure.dpi
    ratio = text.get_window_extent().width / width
    if ratio > 1:
        text.set_fontsize(float(text.get_fontsize()) / ratio)


def _svg_text(figure: Figure) -> str:
    """Return the figure as SVG. Equal figures give equal text."""
    buffer, agg_canvas = io.StringIO(), figure.canvas
    with mpl.rc_context({**RC, "svg.hashsalt": "analysis"}):
        canvas = FigureCanvasSVG(figure)
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    figure.set_canvas(agg_canvas)
    figure.set_dpi(DPI)  # print_svg sets 72
    return buffer.getvalue()


def save_figure(sheet: Sheet, path: Path, caption: str) -> FigureFile:
    """Write a figure as PNG and SVG, and return it for the page.

    Args:
        sheet: A complete figure.
        path: Path of the files without suffix.
        caption: Caption; the remarks of the figure are added to it.
    """
    buffer, text = io.BytesIO(), " ".join(f"{part.rstrip('.')}." for part in (caption, *sheet.remarks))
    # savefig would draw the figure twice, the first time only to lay it out
    sheet.figure.canvas.print_png(buffer, metadata={"Software": None})  # type: ignore[attr-defined]
    svg = _svg_text(sheet.figure)
    write_atomically(path.with_name(f"{path.name}.png"), buffer.getvalue())
    write_atomically(path.with_name(f"{path.name}.svg"), svg.encode())
    element = inline_svg(svg, path.name, _hover_rectangles(sheet.hover_areas, sheet.figure), text)
    return FigureFile(path.name, sheet.heading.title, text, element)


def inline_svg(svg: str, name: str, rectangles: str, alternative: str) -> str:
    """Return an SVG element for a page with other figures.

    Args:
        svg: SVG file as text.
        name: Prefix of all ids, which are unique on the page then.
        rectangles: Elements that show a text on hover.
        alternative: Text for screen readers.
    """
    body = svg[svg.index("<svg ") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    body = re.sub(r" font-family: [^;\"]*;?| transform=\"rotate\(-0 [^\"]*\"", "", body)
    start = f'<svg role="img" aria-label="{escape(alternative)}" '
    return start + body.removeprefix("<svg ").rstrip().removesuffix("</svg>") + rectangles + "</svg>"


def _hover_rectangles(areas: Sequence[HoverArea], figure: Figure) -> str:
    """Return the areas as SVG rectangles with their texts, in points from the top left."""
    figure_height = POINTS_PER_INCH * float(figure.get_size_inches()[1])
    elements = []
    for area in areas:
        corners = area.axes.transData.transform([*zip(area.x, area.y, strict=True)])
        radius = HOVER_RADIUS_POINTS if area.x[0] == area.x[1] else 0
        left, low = corners.min(axis=0) * POINTS_PER_INCH / figure.dpi - radius
        right, top = corners.max(axis=0) * POINTS_PER_INCH / figure.dpi + radius
        sizes = f'width="{max(1.0, right - left):.1f}" height="{max(1.0, top - low):.1f}"'
        place = f'x="{left:.1f}" y="{figure_height - top:.1f}"'
        elements.append(f'<rect {place} {sizes} data-text="{escape(area.text)}"/>')
    return f'<g class="spots">{"".join(elements)}</g>' if elements else ""
