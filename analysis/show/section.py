"""The parts of a report as data: a section has sentences, a table and a sentence on how to read it."""

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
    """Function that returns the text of a row, from the item that the row is about."""
    short: str | None = None
    """Heading in a terminal; None for the same."""
    sorted_by: str | None = None
    """Column of summary.csv that the page sorts by, and whose meaning is the tooltip of the heading."""
    is_words: bool = False
    """Whether texts may take several lines; numbers are never folded."""
    views: frozenset[View] = frozenset(View) - {View.DETAILS}

    @property
    def meaning(self) -> str | None:
        """Meaning of the quantity that the column shows; None where it shows no measured quantity."""
        return None if self.sorted_by is None else meanings_of([self.sorted_by])[0]


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of texts under headings."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    dispensable: Sequence[str] = ()
    """Headings in a terminal that a narrow one leaves out, in this order; the last columns where empty."""

    @classmethod
    def of(cls, columns: Sequence[Column], items: Iterable[Any], dispensable: Sequence[str] = ()) -> Self:
        """Return the table with a row for each item."""
        return cls(columns, [[column.text(item) for column in columns] for item in items], dispensable)

    def in_view(self, view: View) -> Self:
        """Return the table as a view shows it, without columns that have no text in any row."""
        return self.with_columns(
            number
            for number, column in enumerate(self.columns)
            if view in column.views and any(row[number] for row in self.rows)
        )

    def with_columns(self, numbers: Iterable[int]) -> Self:
        """Return the table with these columns alone."""
        kept = [*numbers]
        rows = [[row[number] for number in kept] for row in self.rows]
        return replace(self, columns=[self.columns[number] for number in kept], rows=rows)


@dataclass(frozen=True, slots=True)
class Section:
    """One section of a report; every view shows the same of it, a terminal only what is marked."""

    title: str
    lines: Sequence[str] = ()
    """Sentences above the table."""
    table: Table | None = None
    reading: str = ""
    """Explanation of the table, shown below it."""
    parts: Sequence[Section] = ()
    """Sections within this one."""
    prints_lines: bool = False
    """Whether a terminal shows the sentences."""
    prints_table: bool = False
    """Whether a terminal shows the table."""
    answers: bool = False
    """Whether the section answers the question of the sweep; a terminal shows it next to the prompt."""
    has_own_form: bool = False
    """Whether the page shows the section in a form of its own."""


@dataclass(frozen=True, slots=True)
class FigureFile:
    """One figure as a report shows it."""

    name: str
    """Name of its files in figures/, without the ending."""
    title: str
    caption: str
    """Sentences on what a point is and what a reader must know of these cells."""
    svg: str
    """The picture with what can be pointed at, as a part of the page."""
