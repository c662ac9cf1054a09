"""The summary for people, in Markdown, HTML and a terminal, from the same rows."""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd
from rich.table import Table
from rich.text import Text

from analysis.cells.cells import Cells
from analysis.cells.series import variants
from analysis.cells.statuses import shown_status
from analysis.labels import (
    band_label,
    interval_label,
    n_label,
    percent_label,
    spread_label,
    status_label,
)
from analysis.metrics.definitions import BY_COLUMN, text_of
from bench.labels import length_label
from bench.record import Provenance

OWN_COLUMN = frozenset({"sp_degree", "cluster.world_size"})
HEADINGS = (
    "strategy", "length", "ranks/sp", "status", "tokens/s", "n and 95 % interval", "step time (ms)",
    "peak allocated (of capacity)", "attention exchange: transfer", "attention exchange: waiting",
    "communication: transfer / waiting", "traced steps", "traced / timed", "speed-up",
    "checks made; steps held", "note",
)  # fmt: skip
SORTED_BY = (
    "strategy", "seq_len", "cluster.world_size", "status", "tokens_per_s", "n", "step_time_ms",
    "peak_allocated_bytes", "attention_transfer_share", "attention_waiting_share",
    "communication_transfer_share", "traced_steps", "traced_to_timed", "speed_up",
    "checks_missing", "note",
)  # fmt: skip
"""The summary's column behind each of HEADINGS."""
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
OF_PREDICTIONS: Mapping[str, str] = {
    "n and 95 % interval": "what it is",
    "95 % interval": "band",
}
"""What headings are called where nothing ran."""
NOT_PREDICTED = frozenset({"n", "waiting"})
"""What a terminal does without then."""
TERMINAL_ROWS = 60
MIN_STRATEGY_COLUMNS = 17
LEAST_STRATEGY_COLUMNS = 9
"""Where even the columns that no terminal does without leave no more: longer names are folded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One cell in a reader's words; the fields stand in the order of HEADINGS."""

    strategy: str
    length: str
    ranks: str
    status: str
    tokens_per_s: str
    spread: str
    step_time: str
    peak_allocated: str
    exchange_transfer: str
    exchange_waiting: str
    communication: str
    traced_steps: str
    traced_to_timed: str
    speed_up: str
    checks: str
    note: str

    def texts(self) -> list[str]:
        return [getattr(self, field.name) for field in fields(self)]


def rows_of(cells: Cells) -> list[Row]:
    """The cells in a reader's words, in their order."""
    keys = [key for key in cells.keys if key not in OWN_COLUMN] if len(cells) else []
    return [_row(cell, name) for cell, name in zip(cells.rows, variants(cells.frame, keys), strict=True)]


def headings_of(cells: Cells) -> list[str]:
    """HEADINGS as they are called for these cells."""
    return [OF_PREDICTIONS.get(each, each) if cells.is_all_predicted else each for each in HEADINGS]


NUMBER_HEADINGS = (
    "strategy",
    "length",
    "status",
    "tokens/s",
    "peak allocated",
    "exchange: transfer",
    "waiting",
)
MAX_NUMBERS = 24


def number_rows(cells: Cells) -> list[list[str]]:
    """The numbers of the first MAX_NUMBERS cells under NUMBER_HEADINGS, in the table's order: no ranking."""
    return [
        [
            row.strategy,
            row.length,
            row.status,
            row.tokens_per_s,
            row.peak_allocated,
            *(text_of(cell, f"attention_{part}_share") for part in ("transfer", "waiting")),
        ]
        for row, cell in zip(rows_of(cells)[:MAX_NUMBERS], cells.rows, strict=False)
    ]


def markdown_text(cells: Cells) -> str:
    """The human columns as a Markdown table."""
    return markdown_table(headings_of(cells), [row.texts() for row in rows_of(cells)])


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Texts as a Markdown table."""
    lines = [[*headings], ["---"] * len(headings)]
    lines += [[markdown_cell(text) for text in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def markdown_cell(text: str) -> str:
    """Text that stays in its cell and is no markup."""
    one_line = re.sub(r"\s*\n\s*", " ", text.strip())
    return html.escape(one_line, quote=False).replace("\\", "\\\\").replace("|", "\\|")


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


def _row(cell: dict[Any, Any], name: str) -> Row:
    return Row(
        strategy=f"{cell['strategy']}, {name}" if name else str(cell["strategy"]),
        length=length_label(int(cell["seq_len"])),
        ranks=_ranks(cell),
        status=_status(cell),
        tokens_per_s=_with_band(cell, "tokens_per_s{}"),
        spread=_predicted_from(cell) if is_predicted(cell) else spread_label(cell),
        step_time=_with_band(cell, "step_time{}_ms"),
        peak_allocated=_peak(cell),
        exchange_transfer=_with_range(cell, "attention_transfer"),
        exchange_waiting=_with_range(cell, "attention_waiting"),
        communication=_shares(cell, ("communication_transfer_share", "communication_waiting_share")),
        traced_steps=_traced_steps(cell),
        traced_to_timed=text_of(cell, "traced_to_timed"),
        speed_up=text_of(cell, "speed_up"),
        checks=_checks(cell),
        note=text_of(cell, "note"),
    )


def is_predicted(cell: Mapping[Any, Any]) -> bool:
    """Whether a cell is arithmetic: nothing ran."""
    return bool(cell["provenance"] == Provenance.PREDICTED)


def predicted_band(cell: Mapping[Any, Any], column: str) -> str:
    """What was predicted of a cell, as `189 (161 to 237)`; `column` has {} where the end is named."""
    expected, low, high = (cell[f"predicted_{column.format(end)}"] for end in ("", "_low", "_high"))
    label = BY_COLUMN[column.format("")].text
    return "" if pd.isna(expected) else band_label(expected, low, high, label)


def _with_band(cell: Mapping[Any, Any], column: str) -> str:
    """A value, of a prediction with its band."""
    if is_predicted(cell) and cell["status"] == "ok":
        return predicted_band(cell, column)
    return text_of(cell, column.format(""))


def _predicted_from(cell: Mapping[Any, Any]) -> str:
    """What stands behind a predicted cell's numbers: the hardware, of which a file says what it sustains."""
    return f"band of the model, with the rates of {cell['hardware']}" if cell["status"] == "ok" else ""


def _peak(cell: Mapping[Any, Any]) -> str:
    """`14.5 MiB (7.1 %)`, of a prediction with its band as `14.5 MiB (14.0 MiB to 15.1 MiB), 7.1 %`."""
    size, share = _with_band(cell, "peak_allocated{}_bytes"), percent_label(cell["capacity_share"])
    if not size or not share:
        return size
    return f"{size}, {share}" if size.endswith(")") else f"{size} ({share})"


def _shares(cell: dict[Any, Any], columns: Sequence[str]) -> str:
    """Several shares as `5.0 % / 10.0 %`; a dash for one that is not known."""
    shares = [text_of(cell, column) for column in columns]
    return " / ".join(share or "-" for share in shares) if shares[0] else ""


def _with_range(cell: dict[Any, Any], share: str) -> str:
    """The median of the traced steps and, of several, their range: `0.1 % (0.0 % to 0.4 %)`."""
    median = text_of(cell, f"{share}_share")
    if not median or cell["traced_steps"] == 1:
        return median
    low, high = (text_of(cell, f"{share}_{end}_share") for end in ("low", "high"))
    if not low:
        return median
    return f"{median} ({low} to {high})"


def _traced_steps(cell: dict[Any, Any]) -> str:
    """How many traced steps the shares are of: `n=5`, or `n=3 of 5` where some are void."""
    if pd.isna(cell["traced_steps"]):
        return ""
    used, void = int(cell["traced_steps"]), int(cell["void_traced_steps"])
    return f"n={used} of {used + void}" if void else f"n={used}"


def _checks(cell: dict[Any, Any]) -> str:
    """`9 of 10; 12 of 14`: checks made, and steps held where a cell trains; empty where it is not said."""
    pairs = (("checks_made", "checks"), ("steps_held", "steps"))
    known = [[cell[column] for column in pair] for pair in pairs if pd.notna(cell[pair[1]])]
    return "; ".join(f"{int(part):,} of {int(whole):,}" for part, whole in known)


def _status(cell: dict[Any, Any]) -> str:
    label = status_label(shown_status(cell))
    repeats, failed = int(cell["repeats"]), int(cell["failed_repeats"])
    return f"{label} ({failed} of {repeats})" if 0 < failed < repeats else label


def _ranks(cell: dict[Any, Any]) -> str:
    parts = [cell[key] for key in ("cluster.world_size", "sp_degree")]
    return "/".join("?" if part is None or pd.isna(part) else str(int(part)) for part in parts)
