"""The section of `experiment=max_length`: the longest sequence of each series that trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from analysis.answers.next_steps import MAX_LENGTH
from analysis.cells.capacity import capacity_label
from analysis.cells.series import Series
from analysis.cells.statuses import shown_status
from analysis.labels import percent_label, status_label
from analysis.read.metrics import text_of
from analysis.read.views import View
from analysis.show.columns import speed_text
from analysis.show.findings import Findings
from analysis.show.section import Column, Section, Table
from bench.common.labels import length_label
from bench.record.record import Status

READING = (
    "Trained: a whole step at that length with the optimizer's state there, and every gate that ran passed."
)
WIDE = frozenset({View.SUMMARY, View.PAGE})
ANSWERS = frozenset({Status.OK, Status.OUT_OF_MEMORY})
"""Statuses that say whether a length trains."""
CellRow = Mapping[Any, Any]


@dataclass(frozen=True, slots=True)
class LongestLength:
    """The cells of one series that bound its longest length."""

    name: str
    longest: CellRow | None
    """The longest cell that trained."""
    shortest: CellRow | None
    """The shortest cell that ran out of memory."""
    stopped: CellRow | None
    """A cell that ended in any other way, which says nothing of the length."""


def max_length(findings: Findings) -> Section | None:
    """Return the longest lengths, with a sentence on each search that gave no plain answer."""
    is_searched = findings.cells.frame["experiment"].eq(MAX_LENGTH)
    if not is_searched.any():
        return None
    found = [*map(_longest_length, findings.cells.part(is_searched).series)]
    title, table = "The longest sequence that trains", Table.of(COLUMNS, found)
    lines = [line for each in found for line in _doubts(each)]
    return Section(title, lines, table, READING, prints_lines=True, prints_table=True, answers=True)


def _longest_length(series: Series) -> LongestLength:
    rows: Sequence[CellRow] = series.rows.sort_values("seq_len").to_dict("records")
    return LongestLength(
        name=series.label,
        longest=next((row for row in reversed(rows) if shown_status(row) == Status.OK), None),
        shortest=next((row for row in rows if row["status"] == Status.OUT_OF_MEMORY), None),
        stopped=next((row for row in rows if row["status"] not in ANSWERS), None),
    )


def _doubts(found: LongestLength) -> list[str]:
    """Return what stands against taking the longest length as the limit."""
    longest, shortest, stopped, lines = found.longest, found.shortest, found.stopped, []
    if longest is not None and shortest is not None and longest["seq_len"] > shortest["seq_len"]:
        lines.append(
            f"{found.name}: {_length(shortest)} ran out of memory and {_length(longest)} trained: the longest"
            " length depends on more than the length."
        )
    if stopped is not None:
        lines.append(
            f"{found.name}: the search ended at {_length(stopped)} with {status_label(stopped['status'])},"
            " which says nothing of the length."
        )
    return lines


def _capacity(found: LongestLength) -> str:
    """Return `limit 0.05 GiB, 54.9 %`: the memory of a rank, and how much of it the longest took."""
    cell = found.longest or found.shortest
    if cell is None:
        return ""
    return ", ".join(filter(None, [capacity_label(cell), percent_label(cell["capacity_share"])]))


def _end(found: LongestLength) -> str:
    """Return the reason of the cell that stopped the search, or of the shortest that ran out of memory."""
    cell = found.stopped or found.shortest
    return f"{_length(cell)}: {status_label(cell['status'])}: {cell['reason']}" if cell else "nothing yet"


def _length(cell: CellRow | None) -> str:
    return "none" if cell is None else length_label(int(cell["seq_len"]))


COLUMNS = (
    Column("series", lambda found: str(found.name), is_words=True),
    Column("longest that trained", lambda found: _length(found.longest), "trained"),
    Column("shortest out of memory", lambda found: _length(found.shortest), "out of memory"),
    Column(
        "tokens/s at the longest",
        lambda found: speed_text(found.longest) if found.longest else "",
        "tokens/s",
        sorted_by="tokens_per_s",
    ),
    Column(
        "peak at the longest",
        lambda found: text_of(found.longest, "peak_allocated_bytes") if found.longest else "",
        "peak",
        sorted_by="peak_allocated_bytes",
    ),
    Column("of", _capacity, sorted_by="capacity_share", is_words=True, views=WIDE),
    Column("what ended the search", _end, is_words=True, views=WIDE),
)
