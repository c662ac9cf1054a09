"""Sections as Markdown."""

from __future__ import annotations

import html
import re

from analysis.read.views import View
from analysis.show.section import Section, Table


def markdown_section(section: Section, level: int = 2) -> str:
    """Return the section with its heading, and its parts one level below."""
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
    """Return the table, empty where it has no rows."""
    if not table.rows:
        return ""
    lines = [[column.heading for column in table.columns], ["---"] * len(table.columns)]
    lines += [[markdown_cell(text) for text in row] for row in table.rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def markdown_cell(text: str) -> str:
    """Return text that stays in its cell and is no markup."""
    one_line = re.sub(r"\s*\n\s*", " ", text.strip())
    return html.escape(one_line, quote=False).replace("\\", "\\\\").replace("|", "\\|")
