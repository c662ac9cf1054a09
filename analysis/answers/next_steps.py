"""What to do about the cells without a result: one line per status."""

from __future__ import annotations

import pandas as pd

from analysis.labels import status_label
from bench.next_steps import NEXT_STEPS, WAYS_TO_FIT_READ, next_step


def next_steps(summary: pd.DataFrame) -> list[str]:
    """`What to do, OOM: ...` for every status that cells ended with, in the table's order."""
    read = [key for key in WAYS_TO_FIT_READ if key in summary.columns]
    lines = []
    for status in NEXT_STEPS:
        cells = summary.loc[summary["status"] == status, read].drop_duplicates()
        if len(cells):
            configs = cells.astype("object").where(cells.notna(), None).to_dict("records")
            found = next_step(status, [{str(key): each[key] for key in each} for each in configs])
            lines.append(f"What to do, {status_label(status)}: {found}")
    return lines
