"""The sections of a report, a function each. May import findings, columns and what lies below show.

The one table of sections: a new one is a function from Findings to its Section, and a line below. It then
stands in summary.md, on the page and, where it is marked so, in the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from analysis.show.findings import Findings
from analysis.show.section import Section
from analysis.show.sections.cell_tables import attention, cells, predictions
from analysis.show.sections.loss_equivalence import loss_equivalence
from analysis.show.sections.max_length import max_length
from analysis.show.sections.probe import probe
from analysis.show.sections.published import published_memory, published_throughput
from analysis.show.sections.sentences import answer, failures, figures

SECTIONS: Sequence[Callable[[Findings], Section | None]] = (
    answer,
    loss_equivalence,
    max_length,
    published_memory,
    published_throughput,
    probe,
    cells,
    attention,
    predictions,
    failures,
    figures,
)
"""Sections in the order of summary.md; the page has figures before cells, a terminal the answers last."""


def sections_of(findings: Findings) -> list[Section]:
    """Return the sections that have something to say."""
    made = (section(findings) for section in SECTIONS)
    return [section for section in made if section is not None]
