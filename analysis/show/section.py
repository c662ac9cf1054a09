"""Data types of a report: sections, tables, columns and figure files."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from analysis.read.metrics import meanings_of
from analysis.read.views import View


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table."""

    heading: str
    text: Callable[[Any], str]
    """Function from the item of a row to the text of this column."""
    short: str | None = None
    """Heading in a terminal; None to use `heading`."""
    sorted_by: str | None = None
    """Column of summary.csv by which the page sorts; its meaning is the tooltip of the heading."""
    is_words: bool = False
    """Whether texts may be wrapped; numbers never are."""
    views: frozenset[View] = frozenset(View) - {View.DETAILS}

    @property
    def meaning(self) -> str | None:
        """Meaning of the quantity in the column; None if it shows no measured quantity."""
        return None if self.sorted_by is None else meanings_of([self.sorted_by])[0]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under the headings of columns."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    dispensable: Sequence[str] = ()
    """Headings of the columns that a narrow terminal leaves out, in this order.

    If empty, the last columns are left out first.
    """

    @classmethod
    def from_items(
        cls, columns: Sequence[Column], items: Iterable[Any], dispensable: Sequence[str] = ()
    ) -> Self:
        """Return a table with one row for each item."""
        return cls(columns, [[column.text(item) for column in columns] for item in items], dispensable)

    def in_view(self, view: View) -> Self:
        """Return the table with the columns that a view shows and that have text in some row."""
        return self.with_columns(
            number
            for number, column in enumerate(self.columns)
            if view in column.views and any(row[number] for row in self.rows)
        )

    def with_columns(self, numbers: Iterable[int]) -> Self:
        """Return the table with only the columns that have these numbers, counted from 0."""
        kept = [*numbers]
        rows = [[row[number] for number in kept] for row in self.rows]
        return replace(self, columns=[self.columns[number] for number in kept], rows=rows)


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a report. A terminal shows only what `prints_lines` and `prints_table` say."""

    title: str
    lines: Sequence[str] = ()
    """Sentences above the table."""
    table: Table | None = None
    reading: str = ""
    """Explanation of the table, printed below it."""
    parts: Sequence[Section] = ()
    """Subsections."""
    prints_lines: bool = False
    """Whether a terminal shows the sentences."""
    prints_table: bool = False
    """Whether a terminal shows the table."""
    answers: bool = False
    """Whether the section answers the question of the sweep; a terminal prints it last, near the prompt."""
    has_own_form: bool = False
    """Whether the template of the page lays out this section separately."""


@dataclass(frozen=True, slots=True)
class FigureFile:
    """One figure of a report."""

    name: str
    """Name of the files in figures/, without the suffix."""
    title: str
    caption: str
    """Sentences on what is drawn, what the marks mean and what is left out."""
    svg: str
    """SVG element for the page, with rectangles that show a value on hover."""
