"""Sections as a terminal has room for them."""

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
"""Width of what is printed, less in a narrower terminal."""
MAX_ROWS = 60
MAX_WORDS_WIDTH = 24
ROOM = 10_000
"""Wider than any table."""


def terminal_text(sections: Sequence[Section], *, answer_first: bool) -> str:
    """Return what is printed of these sections: the answer first, or last, next to the prompt."""
    console = Console(highlight=False)
    console.width = min(console.width, MAX_COLUMNS) if console.is_terminal else MAX_COLUMNS
    answers = [section for section in sections if section.answers]
    others = [section for section in sections if not section.answers]
    with console.capture() as printed:
        for section in [*answers, *others] if answer_first else [*others, *reversed(answers)]:
            print_section(console, section)
    return printed.get()


def print_section(console: Console, section: Section) -> None:
    """Print what a terminal shows of a section, its table first; without titles but those of parts."""
    if section.prints_table and section.table is not None and section.table.rows:
        print_table(console, section.table)
    for line in section.lines if section.prints_lines else ():
        has_command = SCRIPT in line or COMMAND in line
        console.print(Text(line), soft_wrap=has_command)  # a folded command cannot be copied
    for part in section.parts:
        lines = [f"{part.title}: {line}" for line in part.lines]
        print_section(console, Section(part.title, lines, part.table, prints_lines=section.prints_lines))


def print_table(console: Console, table: Table) -> None:
    """Print the first rows, and the headings of columns that a narrow terminal has no room for."""
    whole = table.in_view(View.TERMINAL)
    shown, wide = Table(whole.columns, whole.rows[:MAX_ROWS]), console.options.update_width(ROOM)
    headings = [*map(_heading, whole.columns)]
    left_out: set[str] = set()
    for heading in table.dispensable or headings[:0:-1]:
        if console.measure(_drawn(shown), options=wide).maximum <= console.width:
            break
        left_out.add(heading)
        kept = (number for number, each in enumerate(shown.columns) if _heading(each) != heading)
        shown = shown.with_columns(kept)
    console.print(_drawn(shown))
    if len(whole.rows) > MAX_ROWS:
        console.print(f"{more_label(len(whole.rows) - MAX_ROWS, 'row')} in summary.md")
    named = [heading for heading in headings if heading in left_out]
    if named:
        more = count_label(len(named), "more column")
        console.print(Text(f"{more} in summary.md: {', '.join(named)}"))


def _heading(column: Column) -> str:
    return column.short or column.heading


def _drawn(table: Table) -> rich.table.Table:
    drawn = rich.table.Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in table.columns:
        if column.is_words:
            drawn.add_column(_heading(column), overflow="fold", max_width=MAX_WORDS_WIDTH)
        else:
            drawn.add_column(_heading(column), justify="right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*map(Text, row))
    return drawn
