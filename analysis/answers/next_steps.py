"""What to do about the cells without a result: one line per status."""

from __future__ import annotations

from analysis.cells.cells import Cells
from analysis.labels import status_label
from bench.next_steps import NEXT_STEPS, WAYS_TO_FIT_READ, next_step


def next_steps(cells: Cells) -> list[str]:
    """`What to do, OOM: ...` for every status that cells ended with, in the table's order."""
    summary, lines = cells.frame, []
    for status in NEXT_STEPS:
        failed = summary.loc[summary["status"] == status, [*WAYS_TO_FIT_READ]].drop_duplicates()
        if len(failed):
            configs = failed.astype("object").where(failed.notna(), None).to_dict("records")
            found = next_step(status, [{str(key): each[key] for key in each} for each in configs])
            lines.append(f"What to do, {status_label(status)}: {found}")
    return lines
