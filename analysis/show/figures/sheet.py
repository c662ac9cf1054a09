"""A figure around its axes: title and one line above, legend below, what can be pointed at, and its files."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import NamedTuple

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
from bench.record.store import write_whole

WIDTH_INCHES = 4.4
"""A page 390 px wide shows 9 points of this as 10 px; a paper has it as one column and a half."""
AXES_INCHES = 2.5
DPI = 200
POINTS_PER_INCH = 72
MARGIN_INCHES = 0.05
TITLE_INCHES, LINE_INCHES = 0.24, 0.165
AROUND_INCHES = 0.5  # about what the ticks and labels of the axes take below them
HANDLE_INCHES = 0.6  # what a legend takes beside its labels
MAX_COLUMNS = 4
POINT_REACH = 5
"""In points: a little more than half of a marker."""
Handle = Line2D | ErrorbarContainer | BarContainer  # what a legend can show


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands above the axes, a line each."""

    title: str
    subtitle: str  # what, where, on how many ranks
    caveat: str | None = None


class Spot(NamedTuple):
    """What can be pointed at in the data of some axes: a point, or a bar from one corner to the other."""

    axes: Axes
    x: tuple[float, float]
    y: tuple[float, float]
    text: str


@dataclass(frozen=True, slots=True)
class Sheet:
    """A figure while it is drawn: panels below one another, their heights in inches."""

    figure: Figure
    panels: Sequence[Axes]
    inches: Sequence[float]
    heading: Heading
    columns: int = 1
    spots: list[Spot] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What a reader must know of these cells; it stands in the caption."""
    fitted: list[tuple[Text, Artist, float]] = field(default_factory=list)
    """Texts that get smaller where they are wider than a part, 0..1, of what is around them."""

    @property
    def axes(self) -> Axes:
        """The lowest panel, which most figures draw on."""
        return self.panels[-1]

    def point(self, x: float, y: float, text: str) -> None:
        """Say this where a point of the lowest panel is pointed at."""
        self.spots.append(Spot(self.axes, (x, x), (y, y), text))


def new_sheet(heading: Heading, inches: Sequence[float] = (AXES_INCHES,), columns: int = 1) -> Sheet:
    """Empty panels of these heights, one below the other; several in a row where there are `columns`."""
    figure = Figure(figsize=(WIDTH_INCHES * columns, sum(inches)), dpi=DPI)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(len(inches), columns, height_ratios=inches)
    panels = [figure.add_subplot(grid[place]) for place in range(len(inches) * columns)]
    return Sheet(figure, panels, inches, heading, columns)


def drawn(make: Callable[[], Sheet]) -> Sheet:
    """What `make` draws, in this project's style, with header and legend, laid out once for all its files."""
    with mpl.rc_context(RC):
        sheet = make()
        _lay_out(sheet, _add_legend(sheet))
        _write_header(sheet)
        for text, around, part in sheet.fitted:
            fit(text, around, part)
    return sheet


def legend_entries(sheet: Sheet) -> dict[str, Handle]:
    """What the legend shows, by label."""
    return {
        label: each
        for axes in sheet.panels
        for each, label in zip(*axes.get_legend_handles_labels(), strict=True)
        if isinstance(each, Handle)
    }


def _add_legend(sheet: Sheet) -> float:
    """Below the axes, with as many columns as the figure is wide enough for; how high it is, in inches."""
    entries, room = legend_entries(sheet), WIDTH_INCHES * sheet.columns - HANDLE_INCHES
    for columns in range(min(MAX_COLUMNS * sheet.columns, len(entries)), 0, -1):
        labels = [in_lines(label, room) if columns == 1 else label for label in entries]
        legend = sheet.figure.legend(  # type: ignore[call-overload]  # whose handles may be containers too
            entries.values(), labels, loc="outside lower center", ncols=columns, columnspacing=1.2
        )
        box = legend.get_window_extent()
        if columns == 1 or box.width <= sheet.figure.bbox.width:
            return float(box.height) / sheet.figure.dpi
        legend.remove()
    return 0.0


def in_lines(label: str, room: float) -> str:
    """A label in several lines, broken after commas, where it is wider than so many inches."""
    lines = [""]
    for part in label.split(", "):
        longer = f"{lines[-1]}, {part}" if lines[-1] else part
        lines[-1:] = [longer] if not lines[-1] or inches_of(longer) <= room else [lines[-1], part]
    return ",\n".join(lines)


def inches_of(text: str, size: float = RC["font.size"]) -> float:
    """How wide a text is."""
    return float(TextPath((0, 0), text, size=size).get_extents().width) / POINTS_PER_INCH


def _lay_out(sheet: Sheet, legend: float) -> None:
    """Constrained layout, with the figure as high as panels of their heights need."""
    figure = sheet.figure
    header = TITLE_INCHES + LINE_INCHES * (2 if sheet.heading.caveat else 1) + MARGIN_INCHES
    width, height = (float(each) for each in figure.get_size_inches())
    height += header + legend + AROUND_INCHES
    for _ in range(3):
        figure.set_size_inches(width, height)
        rect = (0, 0, 1, 1 - header / height)
        ConstrainedLayoutEngine(rect=rect, w_pad=MARGIN_INCHES, h_pad=MARGIN_INCHES, hspace=0).execute(figure)
        own = sum(axes.bbox.height for axes in sheet.panels[:: sheet.columns]) / figure.dpi
        height += sum(sheet.inches) - own


def _write_header(sheet: Sheet) -> None:
    """From the figure's left end; a line too long for the figure gets smaller."""
    figure, heading = sheet.figure, sheet.heading
    width, height = (float(each) for each in figure.get_size_inches())
    left, y = MARGIN_INCHES / width, height - TITLE_INCHES / 2 - MARGIN_INCHES
    title = figure.text(left, y / height, heading.title, size=11, weight="bold", va="center")
    fit(title, figure)
    lines = [(heading.subtitle, MUTED_COLOR), (heading.caveat or "", BANNER_COLOR)]
    y -= (TITLE_INCHES - LINE_INCHES) / 2
    for text, color in lines:
        y -= LINE_INCHES
        fit(figure.text(left, y / height, text, size=8.5, color=color, va="center"), figure)


def fit(text: Text, around: Artist, part: float = 1.0) -> None:
    """Make a text smaller where it is wider than this part of what is around it."""
    figure = text.get_figure(root=True)
    if figure is None or not text.get_text():
        return
    room = part * around.get_window_extent().width - 2 * MARGIN_INCHES * figure.dpi
    too_wide = text.get_window_extent().width / room
    if too_wide > 1:
        text.set_fontsize(float(text.get_fontsize()) / too_wide)


def _svg(figure: Figure) -> str:
    """The figure as SVG; the same figure gives the same text."""
    buffer, measuring = io.StringIO(), figure.canvas
    with mpl.rc_context({**RC, "svg.hashsalt": "analysis"}):
        canvas = FigureCanvasSVG(figure)
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    figure.set_canvas(measuring)
    figure.set_dpi(DPI)  # which printing made 72
    return buffer.getvalue()


def save(sheet: Sheet, place: Path, caption: str) -> FigureFile:
    """Write a figure as PNG and SVG, and give it to the page."""
    buffer, text = io.BytesIO(), " ".join(f"{each.rstrip('.')}." for each in (caption, *sheet.remarks))
    # savefig would draw it twice, once only to lay it out
    sheet.figure.canvas.print_png(buffer, metadata={"Software": None})  # type: ignore[attr-defined]
    svg = _svg(sheet.figure)
    write_whole(place.with_name(f"{place.name}.png"), buffer.getvalue())
    write_whole(place.with_name(f"{place.name}.svg"), svg.encode())
    in_this_page = in_page(svg, place.name, _rectangles(sheet.spots, sheet.figure), text)
    return FigureFile(place.name, sheet.heading.title, text, in_this_page)


def in_page(svg: str, name: str, rectangles: str, alternative: str) -> str:
    """The SVG as a part of a page that has others: its own names, its alternative text, what to point at."""
    body = svg[svg.index("<svg ") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    body = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", body)
    body = re.sub(r" font-family: [^;\"]*;?| transform=\"rotate\(-0 [^\"]*\"", "", body)
    told = f'<svg role="img" aria-label="{escape(alternative)}" '
    return told + body.removeprefix("<svg ").rstrip().removesuffix("</svg>") + rectangles + "</svg>"


def _rectangles(spots: Sequence[Spot], figure: Figure) -> str:
    """What can be pointed at as rectangles in the SVG's points, from its top left, with their texts."""
    high = POINTS_PER_INCH * float(figure.get_size_inches()[1])
    drawn = []
    for spot in spots:
        corners = spot.axes.transData.transform([*zip(spot.x, spot.y, strict=True)])
        reach = POINT_REACH if spot.x[0] == spot.x[1] else 0
        left, low = corners.min(axis=0) * POINTS_PER_INCH / figure.dpi - reach
        right, top = corners.max(axis=0) * POINTS_PER_INCH / figure.dpi + reach
        sizes = f'width="{max(1.0, right - left):.1f}" height="{max(1.0, top - low):.1f}"'
        drawn.append(f'<rect x="{left:.1f}" y="{high - top:.1f}" {sizes} data-say="{escape(spot.text)}"/>')
    return f'<g class="spots">{"".join(drawn)}</g>' if drawn else ""
