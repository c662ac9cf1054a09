"""What a cell's fold says of the cell as a whole: its numbers that no column of the table shows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from analysis.cells.capacity import capacity_label
from analysis.cells.comparison import BASE
from analysis.figures.waterfall import step_ms, waterfall_of
from analysis.labels import SHARED_CORES, bytes_label, count_label, number_label, percent_label

MODEL_UTILISATION, HARDWARE_UTILISATION = ("mfu_causal", "mfu_full"), ("hfu_causal", "hfu_full")


def cell_facts(cell: Mapping[Any, Any]) -> list[tuple[str, str]]:
    """Names and texts of one row of a summary, without those that are not known."""
    facts = {
        "tokens/s per rank": number_label(cell["tokens_per_s_per_rank"]),
        "tokens/s over the whole window": number_label(cell["window_tokens_per_s"]),
        "MFU (causal / full)": _percents(cell, MODEL_UTILISATION),
        "HFU (causal / full)": _percents(cell, HARDWARE_UTILISATION),
        "speed-up": _speed_up(cell),
        "strong scaling": _scaling(cell),
        "one rank may use": capacity_label(cell),
        "peak reserved": bytes_label(cell["peak_reserved_bytes"]),
        "from ideal attention to the traced step": _waterfall(cell),
        "straggler gap": _with_unit(cell["straggler_gap_ms"], "ms"),
    }
    return [(name, text) for name, text in facts.items() if text]


def _waterfall(cell: Mapping[Any, Any]) -> str:
    """`ideal attention 1.20 ms + packing 0.30 ms + ... = 5.60 ms`, without what took no time."""
    if pd.isna(cell["part_attention_ms"]):
        return ""
    parts = [f"{look.label} {number_label(ms)} ms" for look, ms in waterfall_of(cell) if ms]
    return f"{' + '.join(parts)} = {number_label(step_ms(cell))} ms"


def _percents(cell: Mapping[Any, Any], columns: tuple[str, ...]) -> str:
    """`38.1 % / 61.0 %`, a dash for one that is not known."""
    texts = [percent_label(cell[column]) for column in columns]
    return " / ".join(text or "-" for text in texts) if any(texts) else ""


def _speed_up(cell: Mapping[Any, Any]) -> str:
    """`1.90 times local on 1 rank (cell 0123456789ab)`."""
    return _over_base(cell, "speed_up", BASE, cell["speed_up_base_ranks"], cell["speed_up_base_cell_id"])


def _scaling(cell: Mapping[Any, Any]) -> str:
    """The same over the fewest ranks, with what that is of the ideal."""
    base = (cell["scaling_base_ranks"], cell["scaling_base_cell_id"])
    text = _over_base(cell, "scaling_speed_up", cell["scaling_base_strategy"], *base)
    if not text:
        return ""
    caveat = f"; {SHARED_CORES}" if cell["cluster.device"] == "cpu" else ""
    return f"{text}, efficiency {percent_label(cell['scaling_efficiency'])}{caveat}"


def _over_base(cell: Mapping[Any, Any], column: str, strategy: str, ranks: float | None, cell_id: str) -> str:
    if pd.isna(cell[column]):
        return ""
    where = "" if pd.isna(ranks) else f" on {count_label(int(ranks), 'rank')}"
    return f"{cell[column]:.2f} times {strategy}{where} (cell {cell_id})"


def _with_unit(value: float | None, unit: str) -> str:
    text = number_label(value)
    return f"{text} {unit}" if text else ""
