"""The sections of a report, one function each. May import findings, columns and what lies below show.

To add a section, write a function from Findings to Section and add it to SECTIONS. The section then appears
in summary.md, on the page and, if it is marked for it, in the terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from analysis.show.findings import Findings
from analysis.show.section import Section
from analysis.show.sections.cell_tables import attention_section, cells_section, predictions_section
from analysis.show.sections.loss_equivalence import loss_equivalence_section
from analysis.show.sections.max_length import max_length_section
from analysis.show.sections.published import published_memory_section, published_throughput_section
from analysis.show.sections.quality_section import quality_section
from analysis.show.sections.sentences import answer_section, failures_section, figures_section

SECTIONS: Sequence[Callable[[Findings], Section | None]] = (
    answer_section,
    loss_equivalence_section,
    max_length_section,
    published_memory_section,
    published_throughput_section,
    quality_section,
    cells_section,
    attention_section,
    predictions_section,
    failures_section,
    figures_section,
)
"""Sections in the order of summary.md. The page shows figures before cells, a terminal shows answers last."""


def sections_of(findings: Findings) -> list[Section]:
    """Return the sections that have content."""
    sections = (make_section(findings) for make_section in SECTIONS)
    return [section for section in sections if section is not None]
