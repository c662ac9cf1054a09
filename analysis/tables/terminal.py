"""The rows of a summary as a terminal has room for them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table
from rich.text import Text

from analysis.cells.cells import Cells
from analysis.labels import interval_label, n_label
from analysis.metrics.definitions import text_of
from analysis.tables.rows import OF_PREDICTIONS, is_predicted, rows_of

TERMINAL_HEADINGS = (
    "strategy", "length", "ranks/sp", "status",
    "tokens/s", "n", "95 % interval", "step ms", "peak", "transfer", "waiting",
)  # fmt: skip
RANKS = TERMINAL_HEADINGS[2]
LEFT_HEADINGS = 4
"""The first ones are words, the others numbers."""
DISPENSABLE = ("95 % interval", "waiting", "transfer", "step ms", "ranks/sp", "n")
"""What a narrow terminal does without, in this order."""
DISPENSABLE_OF_PREDICTIONS = ("transfer", "step ms", "ranks/sp")
"""The same where nothing ran: a figure without its band would pass for a measurement."""
NOT_PREDICTED = frozenset({"n", "waiting"})
"""What a terminal does without then."""
TERMINAL_ROWS = 60
MIN_STRATEGY_COLUMNS = 17
LEAST_STRATEGY_COLUMNS = 9
"""Where even the columns that no terminal does without leave no more: longer names are folded."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A table as wide as its terminal, and what of it had no room."""

    table: Table
    left_out: list[str]
    """Headings."""


def terminal_table(cells: Cells, width: int) -> Fitted:
    """The numbers of the first cells; where the terminal is too narrow, without DISPENSABLE columns."""
    rows, is_predicted = _terminal_rows(cells.first(TERMINAL_ROWS)), cells.is_all_predicted
    names = OF_PREDICTIONS if is_predicted else dict[str, str]()
    headings = [each for each in TERMINAL_HEADINGS if not is_predicted or each not in NOT_PREDICTED]
    dispensable = DISPENSABLE_OF_PREDICTIONS if is_predicted else DISPENSABLE
    shown = _fitting(headings, rows, width, dispensable)
    if RANKS not in shown:
        rows = _told_apart(rows)
    left = max(LEAST_STRATEGY_COLUMNS, min(MIN_STRATEGY_COLUMNS, width - sum(_widths(shown, rows).values())))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for heading in shown:
        is_name = heading == TERMINAL_HEADINGS[0]
        table.add_column(
            names.get(heading, heading),
            overflow="fold",
            min_width=left if is_name else None,
            no_wrap=not is_name,
            justify="left" if heading in TERMINAL_HEADINGS[:LEFT_HEADINGS] else "right",
        )
    for row in rows:
        name, *others = (row[heading] for heading in shown)
        table.add_row(Text(_folded(name, left)), *map(Text, others))
    return Fitted(table, [names.get(heading, heading) for heading in headings if heading not in shown])


def _terminal_rows(cells: Cells) -> list[dict[str, str]]:
    """Per cell the texts under TERMINAL_HEADINGS."""
    rows = []
    for row, cell in zip(rows_of(cells), cells.rows, strict=True):
        texts = [
            *row.texts()[:4],
            text_of(cell, "tokens_per_s"),
            n_label(cell).replace("repeats", "rep."),
            _terminal_interval(cell).replace(" to ", "-"),
        ]
        texts += [
            text_of(cell, "step_time_ms"),
            text_of(cell, "peak_allocated_bytes"),
            text_of(cell, "attention_transfer_share"),
            text_of(cell, "attention_waiting_share"),
        ]
        rows.append(dict(zip(TERMINAL_HEADINGS, texts, strict=True)))
    return rows


def _terminal_interval(cell: Mapping[Any, Any]) -> str:
    """The interval of what ran, or the band of a prediction."""
    if not is_predicted(cell):
        return interval_label(cell)
    if cell["status"] != "ok":
        return ""
    ends = [text_of(cell, f"predicted_tokens_per_s_{end}") for end in ("low", "high")]
    return " to ".join(filter(None, ends))


def _fitting(
    headings: Sequence[str], rows: Sequence[Mapping[str, str]], width: int, dispensable: Sequence[str]
) -> list[str]:
    """The headings for which there is room beside a strategy column of MIN_STRATEGY_COLUMNS."""
    widths = _widths(headings, rows)
    for heading in dispensable:
        if MIN_STRATEGY_COLUMNS + sum(widths.values()) > width:
            del widths[heading]
    return [headings[0], *widths]


def _widths(headings: Sequence[str], rows: Sequence[Mapping[str, str]]) -> dict[str, int]:
    """How wide each column but the strategy's is, with the gap before it."""
    return {each: 1 + max(len(each), *(len(row[each]) for row in rows), 0) for each in headings[1:]}


def _folded(name: str, width: int) -> str:
    """A name in lines of at most this width, broken where its words end."""
    lines = [""]
    for word in re.findall(r"[^_ ]*[_ ]?", name):
        if len(lines[-1] + word.rstrip()) > width and lines[-1]:
            lines.append("")
        lines[-1] += word
    return "\n".join(line.rstrip() for line in lines)


def _told_apart(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """The same with ranks and degree beside the strategy where nothing else would tell its cells apart."""
    strategy, length, *_ = TERMINAL_HEADINGS
    seen = Counter((row[strategy], row[length]) for row in rows)
    alike = {strategy for (strategy, _), count in seen.items() if count > 1}
    return [
        {**row, strategy: f"{row[strategy]}, {row[RANKS]}"} if row[strategy] in alike else row for row in rows
    ]


def text_table(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> Fitted:
    """Texts for a terminal, the first column as wide as it needs to be; last columns may have no room."""
    widths = [1 + max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    count = len(headings)
    while count > 1 and MIN_STRATEGY_COLUMNS + sum(widths[1:count]) > width:
        count -= 1
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for number, heading in enumerate(headings[:count]):
        least = None if number else MIN_STRATEGY_COLUMNS
        table.add_column(
            heading,
            justify="right" if number else "left",
            overflow="fold",
            min_width=least,
            no_wrap=number > 0,
        )
    for row in rows:
        table.add_row(*map(Text, row[:count]))
    return Fitted(table, [*headings[count:]])
