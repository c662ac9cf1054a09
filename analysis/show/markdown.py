"""Functions that turn sections and tables into Markdown."""

from __future__ import annotations

import html
import re

from analysis.read.views import View
from analysis.show.section import Section, Table


def markdown_section(section: Section, level: int = 2) -> str:
    """Return a section as Markdown; its parts get headings one level lower."""
    bullets = "\n".join(f"- {markdown_cell(line)}" for line in section.lines)
    table = "" if section.table is None else markdown_table(section.table.in_view(View.SUMMARY))
    parts = [markdown_section(part, level + 1) for part in section.parts]
    blocks = [
        f"{'#' * level} {markdown_cell(section.title)}",
        bullets,
        table,
        markdown_cell(section.reading),
        *parts,
    ]
    return "\n\n".join(filter(None, blocks))


def markdown_table(table: Table) -> str:
    """Return a table as Markdown; empty if it has no rows."""
    if not table.rows:
        return ""
    lines = [[column.heading for column in table.columns], ["---"] * len(table.columns)]
    lines += [[markdown_cell(text) for text in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_cell(text: str) -> str:
    """Return the text on one line for a Markdown table, with HTML, backslashes and pipes escaped."""
    one_line = re.sub(r"\s*\n\s*", " ", text.strip())
    return html.escape(one_line, quote=False).replace("\\", "\\\\").replace("|", "\\|")
