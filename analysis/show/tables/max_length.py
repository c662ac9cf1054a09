"""The longest sequence of each series that trained, and what a longer one ran into, as rows of text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from analysis.cells.capacity import capacity_label
from analysis.cells.cells import Cells
from analysis.cells.series import Series
from analysis.cells.statuses import shown_status
from analysis.labels import percent_label, status_label
from analysis.read.metrics import text_of
from analysis.show.tables.rows import speed_text
from bench.common.labels import length_label
from bench.record.record import Status

EXPERIMENT = "max_length"
HEADINGS = (
    "series", "longest that trained", "shortest out of memory", "begun at", "tokens/s at the longest",
    "peak at the longest", "of", "what ended the search",
)  # fmt: skip
SHORT_HEADINGS = ("series", "trained", "out of memory", "begun at", "tokens/s", "peak", "ran out in")
"""Some of them for a terminal, in its words."""
READING = (
    "Trained: a whole step at that length with the optimizer's state there, and every gate that"
    " ran passed. Begun at: the longest that the memory formula has room for, unless seq_len named another."
)
NONE = "none"
ANSWERS = frozenset({Status.OK, Status.OUT_OF_MEMORY})
"""Statuses that say whether a length trains."""
Row = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """What the cells of one series say of its longest length."""

    name: str
    longest: Row | None
    """The longest cell that trained."""
    shortest: Row | None
    """The shortest that ran out of memory."""
    stopped: Row | None
    """A cell that ended in any other way, which says nothing of the length."""
    begun_at: int

    @property
    def is_monotone(self) -> bool:
        """Whether no length ran out of memory that is shorter than one that trained."""
        if self.longest is None or self.shortest is None:
            return True
        return bool(self.longest["seq_len"] < self.shortest["seq_len"])


def longest_lengths(cells: Cells, records: pd.DataFrame) -> list[Found]:
    """A series each of the cells of the experiment, `local` first; none of other cells.

    `records` are the rows behind the cells, whose order says where each search began.
    """
    own = cells.frame["experiment"].eq(EXPERIMENT)
    if not own.any():
        return []
    in_order = records.sort_values("order", kind="stable")
    return [_found(series, in_order) for series in cells.part(own).series]


def max_length_rows(found: Sequence[Found]) -> list[tuple[str, ...]]:
    """In the order of HEADINGS."""
    return [
        (*_lengths(each), *_at_longest(each), _capacity(each), _end(each))
        for each in found
    ]  # fmt: skip


def max_length_short_rows(found: Sequence[Found]) -> list[tuple[str, ...]]:
    """In the order of SHORT_HEADINGS."""
    return [(*_lengths(each), *_at_longest(each), _place(each)) for each in found]


def max_length_lines(found: Sequence[Found]) -> list[str]:
    """What is said of searches that gave no plain answer: sentences."""
    return [*(_not_monotone(each) for each in found if not each.is_monotone)] + [
        f"{each.name}: the search ended at {_length(each.stopped)} with {_status(each.stopped)}, which says"
        " nothing of the length."
        for each in found
        if each.stopped is not None
    ]


def _found(series: Series, in_order: pd.DataFrame) -> Found:
    rows: Sequence[Row] = series.rows.sort_values("seq_len").to_dict("records")
    first = in_order[in_order["cell_id"].isin(series.rows["cell_id"])].iloc[0]
    return Found(
        name=series.label,
        longest=next((row for row in reversed(rows) if shown_status(row) == Status.OK), None),
        shortest=next((row for row in rows if row["status"] == Status.OUT_OF_MEMORY), None),
        stopped=next((row for row in rows if row["status"] not in ANSWERS), None),
        begun_at=int(first["seq_len"]),
    )


def _lengths(found: Found) -> tuple[str, ...]:
    return found.name, _length(found.longest), _length(found.shortest), length_label(found.begun_at)


def _at_longest(found: Found) -> tuple[str, str]:
    if found.longest is None:
        return "", ""
    return speed_text(found.longest), text_of(found.longest, "peak_allocated_bytes")


def _capacity(found: Found) -> str:
    """`limit 0.05 GiB, 54.9 %`: what a rank may use, and how much of it the longest took."""
    cell = found.shortest if found.longest is None else found.longest
    if cell is None:
        return ""
    share: float = cell["capacity_share"]
    told = "" if math.isnan(share) else percent_label(share)
    return ", ".join(filter(None, [capacity_label(cell), told]))


def _end(found: Found) -> str:
    """The reason of the shortest that ran out of memory; of a search that was stopped, that of its cell."""
    cell = found.shortest if found.stopped is None else found.stopped
    if cell is None:
        return "nothing yet"
    text = f"{_length(cell)}: {_status(cell)}: {cell['reason']}"
    return text if found.is_monotone else f"{text}; {_not_monotone(found)}"


def _place(found: Found) -> str:
    """`rank 1, timing backward`; of a search that was stopped, how."""
    if found.stopped is not None:
        return f"{_status(found.stopped)} at {_length(found.stopped)}"
    if found.shortest is None:
        return ""
    place, colon, _ = str(found.shortest["reason"]).partition(": ")
    return place if colon else ""


def _not_monotone(found: Found) -> str:
    return (
        f"{found.name}: {_length(found.shortest)} ran out of memory and {_length(found.longest)} trained: the"
        " longest length depends on more than the length."
    )


def _length(cell: Row | None) -> str:
    return NONE if cell is None else length_label(int(cell["seq_len"]))


def _status(cell: Row | None) -> str:
    return "" if cell is None else status_label(str(cell["status"]))
