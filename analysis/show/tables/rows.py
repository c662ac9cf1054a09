"""Cells in a reader's words: the rows of every summary, and the Markdown and LaTeX made of them."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import pandas as pd

from analysis.cells.cells import Cells
from analysis.cells.series import variants
from analysis.cells.statuses import shown_status
from analysis.labels import (
    band_label,
    n_label,
    percent_label,
    spread_label,
    status_label,
)
from analysis.read.metrics import METRICS, text_of
from bench.common.labels import length_label, rate_range_label
from bench.record.record import Provenance

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
OF_PREDICTIONS: Mapping[str, str] = {
    "n and 95 % interval": "what it is",
    "95 % interval": "band",
}
"""What headings are called where nothing ran."""
SPEED_UP, STEP_TIME = "speed-up", "step time (ms)"
MAIN = (
    "strategy", "length", "ranks/sp", "status", "tokens/s", "n and 95 % interval", STEP_TIME,
    "peak allocated (of capacity)", "attention exchange: transfer", "attention exchange: waiting", SPEED_UP,
)  # fmt: skip
"""Those of the page's table and of a printed one, ten at a time; the details of a cell have the others."""
NOT_REPLAYED = {"attention exchange: transfer", "attention exchange: waiting", SPEED_UP}
NUMBER_HEADINGS = (
    "strategy", "length", "status", "tokens/s", "peak per rank", "exchange: transfer", "exchange: waiting",
)  # fmt: skip
"""Those of the page's first screen where nothing is ranked."""
MAX_NUMBERS = 24


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


def main_headings(cells: Cells) -> list[str]:
    """Those of MAIN: the speed-up where strategies are ranked, else the step time."""
    left_out = {SPEED_UP if cells.caveat is not None else STEP_TIME}
    if cells.is_all_replayed:
        left_out = NOT_REPLAYED
    return [
        OF_PREDICTIONS.get(each, each) if cells.is_all_predicted else each
        for each in MAIN
        if each not in left_out
    ]


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


def _row(cell: dict[Any, Any], name: str) -> Row:
    return Row(
        strategy=f"{cell['strategy']}, {name}" if name else str(cell["strategy"]),
        length=length_label(int(cell["seq_len"])),
        ranks=_ranks(cell),
        status=_status(cell),
        tokens_per_s=speed_text(cell),
        spread=_spread(cell),
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


def is_replayed(cell: Mapping[Any, Any]) -> bool:
    """Whether one rank of a cell ran without the others."""
    return bool(cell["provenance"] == Provenance.REPLAYED)


def speed_text(cell: Mapping[Any, Any]) -> str:
    """A cell's tokens/s; of a prediction with its band, of a replay with and without the link's time."""
    if not is_replayed(cell) or pd.isna(cell["tokens_per_s"]):
        return _with_band(cell, "tokens_per_s{}")
    with_link = cell["tokens_per_s_with_link"]
    return rate_range_label(None if pd.isna(with_link) else with_link, cell["tokens_per_s"])


def predicted_band(cell: Mapping[Any, Any], column: str) -> str:
    """What was predicted of a cell, as `189 (161 to 237)`; `column` has {} where the end is named."""
    expected, low, high = (cell[f"predicted_{column.format(end)}"] for end in ("", "_low", "_high"))
    label = METRICS[column.format("")].text
    return "" if pd.isna(expected) else band_label(expected, low, high, label)


def _with_band(cell: Mapping[Any, Any], column: str) -> str:
    """A value, of a prediction with its band."""
    if is_predicted(cell) and cell["status"] == "ok":
        return predicted_band(cell, column)
    return text_of(cell, column.format(""))


def _spread(cell: Mapping[Any, Any]) -> str:
    """Samples and interval; of what was not measured what it is."""
    if is_replayed(cell):
        return f"replayed, n={n_label(cell)}" if n_label(cell) else ""
    return _predicted_from(cell) if is_predicted(cell) else spread_label(cell)


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


def summary_table(cells: Cells, form: str) -> str:
    """The main columns of these cells in one of TABLE_FORMS, without those that are empty."""
    rows = [row.texts() for row in rows_of(cells)]
    frame = pd.DataFrame(rows, columns=headings_of(cells), dtype="str")[main_headings(cells)]
    return TABLE_FORMS[form](frame[[heading for heading in frame if any(frame[heading])]])


def _latex(frame: pd.DataFrame) -> str:
    """With booktabs' rules."""
    style = frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis="columns")
    return style.to_latex(hrules=True)


def _markdown(frame: pd.DataFrame) -> str:
    return markdown_table([*frame.columns], frame.to_numpy().tolist())


TABLE_FORMS: Mapping[str, Callable[[pd.DataFrame], str]] = {"latex": _latex, "markdown": _markdown}
