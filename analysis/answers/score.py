"""How near predictions came to what was measured, in one sentence."""

from __future__ import annotations

from analysis.cells.cells import Cells
from analysis.cells.score import FIT_OUTCOME, PEAK, RIGHT, STEP_TIME, STEP_TIME_IN_BAND, UNDECIDED, WRONG, YES
from analysis.labels import count_label, percent_label

OUTCOMES = (RIGHT, WRONG, UNDECIDED)


def score_lines(cells: Cells) -> list[str]:
    """Return a sentence about all cells that have both; none where no cell has."""
    found = []
    for name, column in {"step time": STEP_TIME, "peak allocated": PEAK}.items():
        errors = cells.frame[column].dropna().abs()
        if len(errors):
            median, most = percent_label(errors.median()), percent_label(errors.max())
            cells_of = count_label(len(errors), "cell")
            found.append(f"{name} off by {median} in the median of {cells_of}, {most} at the most")
    in_band = cells.frame[STEP_TIME_IN_BAND].dropna()
    if len(in_band):
        found.append(f"{int(in_band.eq(YES).sum()):,} of {len(in_band):,} step times within the band")
    counts = cells.frame[FIT_OUTCOME].value_counts()
    if len(counts):
        outcomes = ", ".join(f"{int(counts.get(outcome, 0)):,} {outcome}" for outcome in OUTCOMES)
        found.append(f"verdicts on memory: {outcomes}")
    return [f"Predicted beside measured: {'; '.join(found)}."] if found else []
