"""Functions that print sections in a terminal."""

from __future__ import annotations

from collections.abc import Sequence

import rich.table
from rich.console import Console
from rich.text import Text

from analysis.labels import count_label, more_label
from analysis.read.views import View
from analysis.show.section import Column, Section, Table
from bench.common.command import COMMAND, SCRIPT

MAX_COLUMNS = 100
"""Largest width of the output in characters; a narrower terminal has its own width."""
MAX_ROWS = 60
MAX_WORDS_WIDTH = 24
UNLIMITED_WIDTH = 10_000
"""Width at which every table fits."""


def terminal_text(sections: Sequence[Section], *, answer_first: bool) -> str:
    """Return the printed text of these sections.

    Args:
        sections: Sections in the order of the report.
        answer_first: Whether answers come first. Otherwise they come last, near the prompt.
    """
    console = Console(highlight=False)
    console.width = min(console.width, MAX_COLUMNS) if console.is_terminal else MAX_COLUMNS
    answers = [section for section in sections if section.answers]
    others = [section for section in sections if not section.answers]
    with console.capture() as printed:
        for section in [*answers, *others] if answer_first else [*others, *reversed(answers)]:
            print_section(console, section)
    return printed.get()


def print_section(console: Console, section: Section) -> None:
    """Print the table and the sentences of a section as far as it is marked for a terminal.

    The title of a subsection is in front of each of its sentences; other titles are not printed.
    """
    if section.prints_table and section.table is not None and section.table.rows:
        print_table(console, section.table)
    for line in section.lines if section.prints_lines else ():
        has_command = SCRIPT in line or COMMAND in line
        console.print(Text(line), soft_wrap=has_command)  # a wrapped command cannot be copied
    for part in section.parts:
        lines = [f"{part.title}: {line}" for line in part.lines]
        print_section(console, Section(part.title, lines, part.table, prints_lines=section.prints_lines))


def print_table(console: Console, table: Table) -> None:
    """Print the first MAX_ROWS rows with the columns that fit, then the headings of the other columns."""
    whole = table.in_view(View.TERMINAL)
    shown, wide = Table(whole.columns, whole.rows[:MAX_ROWS]), console.options.update_width(UNLIMITED_WIDTH)
    headings = [*map(_heading, whole.columns)]
    left_out: set[str] = set()
    for heading in table.dispensable or headings[:0:-1]:
        if console.measure(_rich_table(shown), options=wide).maximum <= console.width:
            break
        left_out.add(heading)
        kept = (number for number, column in enumerate(shown.columns) if _heading(column) != heading)
        shown = shown.with_columns(kept)
    console.print(_rich_table(shown))
    if len(whole.rows) > MAX_ROWS:
        console.print(f"{more_label(len(whole.rows) - MAX_ROWS, 'row')} in summary.md")
    if names := [heading for heading in headings if heading in left_out]:
        more = count_label(len(names), "more column")
        console.print(Text(f"{more} in summary.md: {', '.join(names)}"))


def _heading(column: Column) -> str:
    return column.short or column.heading


def _rich_table(table: Table) -> rich.table.Table:
    drawn = rich.table.Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns:
        if column.is_words:
            drawn.add_column(_heading(column), overflow="fold", max_width=MAX_WORDS_WIDTH)
        else:
            drawn.add_column(_heading(column), justify="right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
