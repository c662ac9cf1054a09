"""Figures of a test's cells: as drawn on their axes, or laid out as in a report."""

import itertools

import matplotlib as mpl
from matplotlib.text import Text

from analysis.cells.selection import for_figures
from analysis.show.figures.figures import FIGURES, build
from analysis.show.figures.sheet import Heading
from analysis.show.figures.style import RC


def sheet_of(name, cells):
    """What a figure draws, before it is laid out, which takes long."""
    with mpl.rc_context(RC):
        return FIGURES[name].sheet(cells, Heading(FIGURES[name].title, cells.heading))


def axes_of(name, cells):
    return sheet_of(name, cells).axes


def built(name, cells):
    return build(name, for_figures(cells))


def texts(figure):
    """Every text of a figure."""
    return [text.get_text() for text in figure.findobj(Text)]


def beyond(axis):
    """The labels of ticks beyond the ends of the axis, which are not drawn."""
    low, high = sorted(axis.get_view_interval())
    for tick in [*axis.get_major_ticks(), *axis.get_minor_ticks()]:
        if not low <= tick.get_loc() <= high:
            yield from (tick.label1, tick.label2)


def boxes_of_texts(figure):
    figure.draw_without_rendering()
    unseen = {
        id(label) for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in beyond(axis)
    }
    shown = [
        each
        for each in figure.findobj(Text)
        if each.get_visible() and each.get_text().strip() and id(each) not in unseen
    ]
    return {(id(each), each.get_text()): each.get_window_extent() for each in shown}


def overlaps_in(figure):
    return [
        (one[1], two[1])
        for (one, a), (two, b) in itertools.combinations(boxes_of_texts(figure).items(), 2)
        if a.x0 + 1 < b.x1 and b.x0 + 1 < a.x1 and a.y0 + 1 < b.y1 and b.y0 + 1 < a.y1
    ]


def cut_off_in(figure):
    """The texts that reach over the figure's edge, by more than a hundredth of an inch."""
    width, height = figure.bbox.width, figure.bbox.height
    slack = figure.dpi / 100
    return [
        text
        for (_, text), box in boxes_of_texts(figure).items()
        if box.x0 < -slack or box.y0 < -slack or box.x1 > width + slack or box.y1 > height + slack
    ]
