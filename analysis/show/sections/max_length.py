"""Section of `experiment=max_length`: the longest sequence of each series that trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from analysis.answers.next_steps import MAX_LENGTH_EXPERIMENT
from analysis.cells.capacity import capacity_label
from analysis.cells.series import Series
from analysis.cells.statuses import shown_status
from analysis.labels import percent_label, status_label
from analysis.read.metrics import metric_text
from analysis.read.views import View
from analysis.show.columns import CellRow, speed_text
from analysis.show.findings import Findings
from analysis.show.section import Column, Section, Table
from bench.common.labels import length_label
from bench.record.record import Status

READING = (
    "A length trains if a whole step ran with the optimizer state in memory and every gate that ran passed."
)
WIDE = frozenset({View.SUMMARY, View.PAGE})
DECISIVE_STATUSES = frozenset({Status.OK, Status.OUT_OF_MEMORY})
"""Statuses that show whether a length trains."""


@dataclass(frozen=True, slots=True)
class LongestLength:
    """Cells of one series between which its longest length lies."""

    name: str
    longest: CellRow | None
    """Longest cell that trained."""
    shortest: CellRow | None
    """Shortest cell that ran out of memory."""
    stopped: CellRow | None
    """Shortest cell that ended in another way, which does not show whether its length trains."""


def max_length_section(findings: Findings) -> Section | None:
    """Return the table of longest lengths, with sentences on searches without a clear answer.

    None if no cell is of `experiment=max_length`.
    """
    is_searched = findings.cells.frame["experiment"].eq(MAX_LENGTH_EXPERIMENT)
    if not is_searched.any():
        return None
    lengths = [*map(_longest_length, findings.cells.select(is_searched).series)]
    title, table = "The longest sequence that trains", Table.from_items(COLUMNS, lengths)
    lines = [line for length in lengths for line in _doubts(length)]
    return Section(title, lines, table, READING, prints_lines=True, prints_table=True, answers=True)


def _longest_length(series: Series) -> LongestLength:
    rows: Sequence[CellRow] = series.rows.sort_values("seq_len").to_dict("records")
    return LongestLength(
        name=series.label,
        longest=next((row for row in reversed(rows) if shown_status(row) == Status.OK), None),
        shortest=next((row for row in rows if row["status"] == Status.OUT_OF_MEMORY), None),
        stopped=next((row for row in rows if row["status"] not in DECISIVE_STATUSES), None),
    )


def _doubts(series: LongestLength) -> list[str]:
    """Return sentences on why the longest length that trained may not be the limit."""
    longest, shortest, stopped, lines = series.longest, series.shortest, series.stopped, []
    if longest is not None and shortest is not None and longest["seq_len"] > shortest["seq_len"]:
        lines.append(
            f"{series.name}: {_length_text(shortest)} ran out of memory but {_length_text(longest)} trained,"
            " so more than the length decides what fits."
        )
    if stopped is not None:
        status = status_label(stopped["status"])
        lines.append(
            f"{series.name}: the search stopped at {_length_text(stopped)} ({status}), which does not"
            " show whether that length trains."
        )
    return lines


def _capacity_text(series: LongestLength) -> str:
    """Return `limit 0.05 GiB, 54.9 %`: the memory of a rank and the share that the longest cell used."""
    cell = series.longest or series.shortest
    if cell is None:
        return ""
    return ", ".join(filter(None, [capacity_label(cell), percent_label(cell["capacity_share"])]))


def _end_text(series: LongestLength) -> str:
    """Return the reason of the cell that stopped the search, or of the shortest cell out of memory."""
    cell = series.stopped or series.shortest
    return (
        f"{_length_text(cell)}: {status_label(cell['status'])}: {cell['reason']}" if cell else "nothing yet"
    )


def _length_text(cell: CellRow | None) -> str:
    return "none" if cell is None else length_label(int(cell["seq_len"]))


COLUMNS = (
    Column("series", lambda series: str(series.name), is_words=True),
    Column("longest that trained", lambda series: _length_text(series.longest), "trained"),
    Column("shortest out of memory", lambda series: _length_text(series.shortest), "out of memory"),
    Column(
        "tokens/s at the longest",
        lambda series: speed_text(series.longest) if series.longest else "",
        "tokens/s",
        sorted_by="tokens_per_s",
    ),
    Column(
        "peak at the longest",
        lambda series: metric_text(series.longest, "peak_allocated_bytes") if series.longest else "",
        "peak",
        sorted_by="peak_allocated_bytes",
    ),
    Column("capacity (share used)", _capacity_text, sorted_by="capacity_share", is_words=True, views=WIDE),
    Column("what ended the search", _end_text, is_words=True, views=WIDE),
)
