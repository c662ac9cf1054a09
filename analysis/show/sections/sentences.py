"""Sections without tables: the answer, the failures, and the captions of the figures."""

from __future__ import annotations

from analysis.answers.next_steps import next_steps
from analysis.answers.no_result import failure_reasons
from analysis.labels import status_label
from analysis.show.findings import Findings
from analysis.show.section import Section
from bench.record.record import Status


def answer_section(findings: Findings) -> Section:
    """Return the answer with its notes; if all cells are predicted, also the lines of all comparisons."""
    verdict = findings.verdict
    details = verdict.details if findings.cells.is_all_predicted else []
    lines = [verdict.answer, *details, *filter(None, [verdict.caveat]), *verdict.notes]
    return Section("Answer", lines, prints_lines=True, answers=True, has_own_form=True)


def failures_section(findings: Findings) -> Section | None:
    """Return why cells have no result; after the reasons of each status follows the advice on it.

    None if every cell has a result.
    """
    lines = failure_reasons(findings.cells)
    if not lines:
        return None
    advice = next_steps(findings.cells)
    for label in map(status_label, Status):
        last = max((place for place, line in enumerate(lines) if line.startswith(label)), default=len(lines))
        lines[last + 1 : last + 1] = [line for line in advice if label in line.partition(":")[0]]
    return Section("Why cells failed", lines, prints_lines=True)


def figures_section(findings: Findings) -> Section | None:
    """Return the captions of the figures; figures with equal captions share a line."""
    files_by_caption: dict[tuple[str, str], list[str]] = {}
    for figure in findings.figures:
        files_by_caption.setdefault((figure.title, figure.caption), []).append(f"figures/{figure.name}.png")
    if not files_by_caption:
        return None
    lines = [
        f"{title} ({', '.join(files)}): {caption}" for (title, caption), files in files_by_caption.items()
    ]
    return Section("Figures", lines, has_own_form=True)
