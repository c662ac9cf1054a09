"""Views of a report in which a column of the table of cells, or a metric, can be shown."""

from __future__ import annotations

from enum import Enum


class View(Enum):
    """A place in which a report shows a table."""

    SUMMARY = "summary.md"
    PAGE = "report.html"
    FIRST_SCREEN = "the first screen of report.html, where strategies are not ranked"
    DETAILS = "the details of a cell in report.html"
    TERMINAL = "the terminal"
