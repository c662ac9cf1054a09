"""Which records count, and which are not set beside one another, in sentences."""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from analysis.labels import count_label
from analysis.read.archive import MADE_WITH, Archive, origins

APART = "code", "torch"
"""Those of MADE_WITH that a reader sees nowhere else: a device is part of what every figure says."""


def origin_lines(archive: Archive, frame: pd.DataFrame, mixed: Collection[str]) -> list[str]:
    """What is kept apart, what was put together on request, and what was left out; empty of a plain sweep.

    `frame` is the archive's before it was mixed.
    """
    several = {kind: origins(frame, kind) for kind in MADE_WITH}
    apart = [
        f"{len(values)} values of {kind} ({', '.join(values)})"
        for kind, values in several.items()
        if kind in APART and kind not in mixed and len(values) > 1
    ]
    together = [f"{kind} {' and '.join(several[kind])}" for kind in mixed if len(several[kind]) > 1]
    lines = []
    if apart:
        lines.append(
            f"The records were made with {' and '.join(apart)}: no series and no speed-up holds two of them;"
            " analysis.report --mix puts them together."
        )
    if together:
        lines.append(f"Put together by --mix: {'; '.join(together)}.")
    if archive.left_out:
        why = ", ".join(f"{count:,} {reason}" for reason, count in archive.left_out.items())
        total = sum(archive.left_out.values())
        lines.append(f"Left out: {count_label(total, 'earlier record')} of cells that ran again ({why}).")
    return lines
