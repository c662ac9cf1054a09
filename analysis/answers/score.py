"""How near predictions came to what was measured, in one sentence."""

from __future__ import annotations

from analysis.cells.cells import Cells
from analysis.cells.score import FIT_OUTCOME, RIGHT, UNDECIDED, WRONG, Score, scores
from analysis.labels import count_label, percent_label

OUTCOMES = (RIGHT, WRONG, UNDECIDED)


def score_lines(cells: Cells) -> list[str]:
    """A sentence about all cells that have both; none where no cell has."""
    found = [_scored(score) for score in scores(cells.frame)]
    counts = cells.frame[FIT_OUTCOME].value_counts()
    if len(counts):
        outcomes = ", ".join(f"{int(counts.get(outcome, 0)):,} {outcome}" for outcome in OUTCOMES)
        found.append(f"verdicts on memory: {outcomes}")
    return [f"Predicted beside measured: {'; '.join(found)}."] if found else []


def _scored(score: Score) -> str:
    """`step time off by 6.1 % in the median of 12 cells, 14.0 % at the most, 10 of 12 within the band`."""
    error = f"{score.name} off by {percent_label(score.median_error)}"
    if score.cells > 1:
        most = percent_label(score.largest_error)
        error += f" in the median of {count_label(score.cells, 'cell')}, {most} at the most"
    inside = f", {score.in_band:,} of {score.with_band:,} within the band" if score.with_band else ""
    return error + inside
