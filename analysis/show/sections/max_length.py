"""The section of `experiment=max_length`: the longest sequence of each series that trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from analysis.cells.capacity import capacity_label
from analysis.cells.longest import LongestLength
from analysis.labels import percent_label, status_label
from analysis.read.metrics import text_of
from analysis.read.views import View
from analysis.show.columns import speed_text
from analysis.show.findings import Findings
from analysis.show.section import Column, Section, Table
from bench.common.labels import length_label

READING = (
    "Trained: a whole step at that length with the optimizer's state there, and every gate that"
    " ran passed. Begun at: the longest that the memory formula has room for, unless seq_len named another."
)
WIDE, TERMINAL = frozenset({View.SUMMARY, View.PAGE}), frozenset({View.TERMINAL})


def max_length(findings: Findings) -> Section | None:
    """Return the longest lengths, with a sentence on each search that gave no plain answer."""
    found = findings.longest
    if not found:
        return None
    lines = [_not_monotone(each) for each in found if not each.is_monotone] + [
        f"{each.name}: the search ended at {_length(each.stopped)} with {_status(each.stopped)}, which says"
        " nothing of the length."
        for each in found
        if each.stopped is not None
    ]
    title, table = "The longest sequence that trains", Table.of(COLUMNS, found)
    return Section(title, lines, table, READING, prints_lines=True, prints_table=True, answers=True)


def _capacity(found: LongestLength) -> str:
    """Return `limit 0.05 GiB, 54.9 %`: the memory of a rank, and how much of it the longest took."""
    cell = found.shortest if found.longest is None else found.longest
    if cell is None:
        return ""
    return ", ".join(filter(None, [capacity_label(cell), percent_label(cell["capacity_share"])]))


def _end(found: LongestLength) -> str:
    """Return the reason of the shortest that ran out of memory, or of the cell that stopped the search."""
    cell = found.shortest if found.stopped is None else found.stopped
    if cell is None:
        return "nothing yet"
    text = f"{_length(cell)}: {_status(cell)}: {cell['reason']}"
    return text if found.is_monotone else f"{text}; {_not_monotone(found)}"


def _place(found: LongestLength) -> str:
    """Return `rank 1, timing backward`; of a search that was stopped, how."""
    if found.stopped is not None:
        return f"{_status(found.stopped)} at {_length(found.stopped)}"
    if found.shortest is None:
        return ""
    place, colon, _ = str(found.shortest["reason"]).partition(": ")
    return place if colon else ""


def _not_monotone(found: LongestLength) -> str:
    return (
        f"{found.name}: {_length(found.shortest)} ran out of memory and {_length(found.longest)} trained: the"
        " longest length depends on more than the length."
    )


def _length(cell: Mapping[Any, Any] | None) -> str:
    return "none" if cell is None else length_label(int(cell["seq_len"]))


def _status(cell: Mapping[Any, Any] | None) -> str:
    return "" if cell is None else status_label(str(cell["status"]))


COLUMNS = (
    Column("series", lambda found: str(found.name), is_words=True),
    Column("longest that trained", lambda found: _length(found.longest), "trained"),
    Column("shortest out of memory", lambda found: _length(found.shortest), "out of memory"),
    Column("begun at", lambda found: length_label(found.begun_at)),
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
    Column("ran out in", _place, views=TERMINAL),
)
