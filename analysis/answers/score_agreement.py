"""States whether strategies give the same scores in `experiment=quality`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from analysis.answers.verdict import Verdict
from analysis.cells.quality import ScoredCell
from analysis.labels import count_label


def with_scores(verdict: Verdict, cells: Sequence[ScoredCell], *, alone: bool) -> Verdict:
    """Return the verdict, with a sentence on the agreement of scores in front of its answer.

    Args:
        verdict: Verdict on the cells' speeds.
        cells: Cells that score a model; without any, the verdict is returned unchanged.
        alone: Whether all records are of `experiment=quality`. The question is then not their speed, so
            sentences on speed are removed.
    """
    if not cells:
        return verdict
    answer = agreement_line(cells)
    if not alone:
        return replace(verdict, answer=f"{answer} {verdict.answer}")
    return replace(verdict, answer=answer, details=[], certainty="", to_decide=None, shares=[])


def agreement_line(cells: Sequence[ScoredCell]) -> str:
    """Return a sentence on whether strategies give the same scores for the same weights."""
    matched = [cell for cell in cells if cell.record.quality and cell.record.quality.match]
    pairs = [(cell, cell.record.quality.match) for cell in matched if cell.record.quality]
    differing = [cell for cell, match in pairs if match is not None and not match.is_within]
    matches = [match for _, match in pairs if match is not None]
    if differing:
        first = min(differing, key=lambda cell: cell.seq_len)
        return (
            f"The strategies do not agree, first at {first.seq_len} tokens: {first.series},"
            f" {first.record.reason}."
        )
    if not matches:
        return "No two cells scored the same weights, so nothing says whether the strategies agree."
    largest = max(match.difference or 0.0 for match in matches)
    return (
        f"The strategies agree: in {count_label(len(matches), 'cell')} with the weights of another cell, the"
        f" mean log-likelihood of an answer's token differs by at most {largest:.1e} nats, at any length,"
        f" task and depth (limit {min(match.limit for match in matches):.1e})."
    )
