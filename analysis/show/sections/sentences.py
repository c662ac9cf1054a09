"""The sections of sentences: the answer, why cells failed, and what the figures show."""

from __future__ import annotations

from analysis.answers.next_steps import next_steps
from analysis.answers.no_result import failure_reasons
from analysis.show.findings import Findings
from analysis.show.section import Section


def answer(findings: Findings) -> Section:
    """Return the answer; of predictions, which the first lines must tell apart, also each comparison."""
    verdict = findings.verdict
    details = verdict.details if findings.cells.is_all_predicted else []
    lines = [verdict.answer, *details, *filter(None, [verdict.caveat]), *verdict.notes]
    return Section("Answer", lines, prints_lines=True, answers=True, has_own_form=True)


def failures(findings: Findings) -> Section | None:
    """Return the reasons of cells without a result, and what to do about them."""
    reasons = failure_reasons(findings.cells)
    if not reasons:
        return None
    return Section("Why cells failed", [*reasons, *next_steps(findings.cells)], prints_lines=True)


def figures(findings: Findings) -> Section | None:
    """Return the captions of the figures; those with equal captions share one."""
    alike: dict[tuple[str, str], list[str]] = {}
    for figure in findings.figures:
        alike.setdefault((figure.title, figure.caption), []).append(f"figures/{figure.name}.png")
    if not alike:
        return None
    lines = [f"{title} ({', '.join(files)}): {caption}" for (title, caption), files in alike.items()]
    return Section("Figures", lines, has_own_form=True)
