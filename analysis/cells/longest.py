"""The longest sequence of each series that trained, and what a longer one ran into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.series import Series
from analysis.cells.statuses import shown_status
from bench.record.record import Status

EXPERIMENT = "max_length"
ANSWERS = frozenset({Status.OK, Status.OUT_OF_MEMORY})
"""Statuses that say whether a length trains."""


@dataclass(frozen=True, slots=True)
class LongestLength:
    """The cells of one series that bound its longest length."""

    name: str
    longest: Mapping[Any, Any] | None
    """The longest cell that trained."""
    shortest: Mapping[Any, Any] | None
    """The shortest cell that ran out of memory."""
    stopped: Mapping[Any, Any] | None
    """A cell that ended in any other way, which says nothing of the length."""
    begun_at: int
    """Tokens of the first length that was tried."""

    @property
    def is_monotone(self) -> bool:
        """Whether no length ran out of memory that is shorter than one that trained."""
        if self.longest is None or self.shortest is None:
            return True
        return bool(self.longest["seq_len"] < self.shortest["seq_len"])


def longest_lengths(cells: Cells, records: pd.DataFrame) -> list[LongestLength]:
    """Return the bounds of each series of the experiment's cells, `local` first; none of other cells.

    `records` are the rows behind the cells, whose order says where each search began.
    """
    own = cells.frame["experiment"].eq(EXPERIMENT)
    if not own.any():
        return []
    in_order = records.sort_values("order", kind="stable")
    return [_longest_length(series, in_order) for series in cells.part(own).series]


def _longest_length(series: Series, in_order: pd.DataFrame) -> LongestLength:
    rows: Sequence[Mapping[Any, Any]] = series.rows.sort_values("seq_len").to_dict("records")
    first = in_order[in_order["cell_id"].isin(series.rows["cell_id"])].iloc[0]
    return LongestLength(
        name=series.label,
        longest=next((row for row in reversed(rows) if shown_status(row) == Status.OK), None),
        shortest=next((row for row in rows if row["status"] == Status.OUT_OF_MEMORY), None),
        stopped=next((row for row in rows if row["status"] not in ANSWERS), None),
        begun_at=int(first["seq_len"]),
    )
