"""The rows of a summary as a terminal has room for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from analysis.cells.cells import Cells
from analysis.labels import count_label, interval_label, n_label
from analysis.read.metrics import text_of
from analysis.show.tables.rows import OF_PREDICTIONS, is_predicted, is_replayed, rows_of, speed_text

WORDS = frozenset({"strategy", "series", "status"})
"""Headings of words, which take several lines where there is little room; numbers are never folded."""
MAX_WORDS_WIDTH = 24
DISPENSABLE: Sequence[str] = ("95 % interval", "waiting", "transfer", "step ms", "n")
"""What a narrow terminal does without, in this order."""
DISPENSABLE_OF_PREDICTIONS = ("transfer", "step ms")
"""What it does without if nothing ran: a figure without its band would pass for a measurement."""
NOT_PREDICTED = frozenset({"n", "waiting"})
"""What a terminal does without then."""
TERMINAL_ROWS = 60
ROOM = 10_000
"""Wider than any table."""


def print_cells(console: Console, cells: Cells) -> None:
    """Print the numbers of the first cells."""
    columns, dispensable = _columns(cells.first(TERMINAL_ROWS)), DISPENSABLE
    if cells.is_all_replayed:  # what is measured between ranks is not there
        columns = {heading: texts for heading, texts in columns.items() if any(texts)}
    if cells.is_all_predicted:
        dispensable = DISPENSABLE_OF_PREDICTIONS
        columns = {OF_PREDICTIONS.get(k, k): texts for k, texts in columns.items() if k not in NOT_PREDICTED}
    print_table(console, columns, dispensable)


def print_table(
    console: Console, columns: Mapping[str, Sequence[str]], dispensable: Sequence[str] | None = None
) -> None:
    """Print texts by heading and name what has no room: of `dispensable` the first, else the last columns."""
    shown, wide = {**columns}, console.options.update_width(ROOM)
    for heading in [*columns][:0:-1] if dispensable is None else dispensable:
        if console.measure(_table(shown), options=wide).maximum <= console.width:
            break
        del shown[heading]
    console.print(_table(shown))
    left_out = [heading for heading in columns if heading not in shown]
    if left_out:
        more = count_label(len(left_out), "more column")
        console.print(Text(f"{more} in summary.md: {', '.join(left_out)}"))


def _table(columns: Mapping[str, Sequence[str]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in columns:
        if heading in WORDS:
            table.add_column(heading, overflow="fold", max_width=MAX_WORDS_WIDTH)
        else:
            table.add_column(heading, justify="right", no_wrap=True)
    for row in zip(*columns.values(), strict=True):
        table.add_row(*map(Text, row))
    return table


def _columns(cells: Cells) -> dict[str, list[str]]:
    """The cells' texts by heading."""
    rows = rows_of(cells)
    numbers = {
        "step ms": "step_time_ms",
        "peak": "peak_allocated_bytes",
        "transfer": "attention_transfer_share",
        "waiting": "attention_waiting_share",
    }
    return {
        "strategy": [row.strategy for row in rows],
        "length": [row.length for row in rows],
        "ranks/sp": [row.ranks for row in rows],
        "status": [row.status for row in rows],
        "tokens/s": [speed_text(c) if is_replayed(c) else text_of(c, "tokens_per_s") for c in cells.rows],
        "n": [n_label(cell).replace("repeats", "rep.") for cell in cells.rows],
        "95 % interval": [_interval(cell).replace(" to ", "-") for cell in cells.rows],
    } | {heading: [text_of(cell, name) for cell in cells.rows] for heading, name in numbers.items()}


def _interval(cell: Mapping[Any, Any]) -> str:
    """The interval of what ran, or the band of a prediction."""
    if is_replayed(cell):
        return ""
    if not is_predicted(cell):
        return interval_label(cell)
    if cell["status"] != "ok":
        return ""
    ends = [text_of(cell, f"predicted_tokens_per_s_{end}") for end in ("low", "high")]
    return " to ".join(filter(None, ends))
