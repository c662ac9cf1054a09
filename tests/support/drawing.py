"""Draw figures of cells in tests, and find texts that overlap or are cut off."""

import itertools

import matplotlib as mpl
from matplotlib.text import Text

from analysis.cells.selection import select_for_figures
from analysis.show.figures.figures import FIGURES, draw_figure
from analysis.show.figures.sheet import Heading
from analysis.show.figures.style import RC


def sheet_of(name, cells):
    """Return the sheet of a figure before its layout, which takes long."""
    with mpl.rc_context(RC):
        return FIGURES[name].sheet(cells, Heading(FIGURES[name].title, cells.heading))


def axes_of(name, cells):
    """Return the axes of a figure before its layout."""
    return sheet_of(name, cells).axes


def built_figure(name, cells):
    """Return a figure laid out as in a report."""
    return draw_figure(name, select_for_figures(cells))


def texts_of(figure):
    """Return every text of a figure."""
    return [text.get_text() for text in figure.findobj(Text)]


def undrawn_labels(axis):
    """Yield the labels of ticks beyond the ends of the axis, which are not drawn."""
    low, high = sorted(axis.get_view_interval())
    for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
        if not low <= tick.get_loc() <= high:
            yield from (tick.label1, tick.label2)


def text_boxes(figure):
    """Return the window extent of each drawn text, by its identity and words."""
    figure.draw_without_rendering()
    undrawn = {
        id(label)
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for label in undrawn_labels(axis)
    }
    drawn = [
        text
        for text in figure.findobj(Text)
        if text.get_visible() and text.get_text().strip() and id(text) not in undrawn
    ]
    return {(id(text), text.get_text()): text.get_window_extent() for text in drawn}


def overlaps_in(figure):
    """Return the pairs of texts whose boxes overlap by more than a pixel."""
    return [
        (first, second)
        for ((_, first), a), ((_, second), b) in itertools.combinations(text_boxes(figure).items(), 2)
        if a.x0 + 1 < b.x1 and b.x0 + 1 < a.x1 and a.y0 + 1 < b.y1 and b.y0 + 1 < a.y1
    ]


def cut_off_in(figure):
    """Return the texts that cross the figure's edge by more than a hundredth of an inch."""
    width, height = figure.bbox.width, figure.bbox.height
    slack = figure.dpi / 100
    return [
        text
        for (_, text), box in text_boxes(figure).items()
        if box.x0 < -slack or box.y0 < -slack or box.x1 > width + slack or box.y1 > height + slack
    ]
