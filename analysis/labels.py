"""Texts for values: sizes, fractions, numbers, statuses. The analysis converts units only here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
from rich.console import Console

from bench.common.labels import size_label

PIPE_COLUMNS = 200
"""Width of tables that are printed to a pipe or file, in characters."""
MISSING = ""
"""Text of a missing number; the status and the note in the same row say why it is missing."""
SHARED_CORES = "CPU ranks share cores, so this says nothing about scaling on GPUs"
STATUS_LABELS: Mapping[str, str] = {
    "out_of_memory": "OOM",
    "timed_out": "timed out",
    "wrong_result": "wrong result",
    "predicted_fits": "fits (predicted)",
    "predicted_undecided": "undecided (predicted)",
    "predicted_out": "OOM (predicted)",
    "replayed_undecided": "undecided (replayed)",
}


def status_label(status: str) -> str:
    """Return `OOM` for out_of_memory, and other statuses as plain words."""
    return STATUS_LABELS.get(status, status)


def bytes_label(size: float | None) -> str:
    """Return bytes in the largest binary unit that leaves at least one: `14.5 MiB`."""
    return MISSING if size is None or pd.isna(size) else size_label(size)


def percent_label(fraction: float | None) -> str:
    """Return a fraction of 0..1 as `12.3 %`."""
    return MISSING if fraction is None or pd.isna(fraction) else f"{fraction:.1%}".replace("%", " %")


def signed_percent_label(fraction: float | None) -> str:
    """Return a relative difference as `+12.3 %`."""
    return MISSING if fraction is None or pd.isna(fraction) else f"{fraction:+.1%}".replace("%", " %")


def band_label(
    expected: float | None, low: float | None, high: float | None, label: Callable[[float | None], str]
) -> str:
    """Return `43,252 (34,587 to 50,729)`; only the first number where all three have the same text."""
    texts = [label(value) for value in (expected, low, high)]
    return texts[0] if len({*texts}) == 1 else f"{texts[0]} ({texts[1]} to {texts[2]})"


def number_label(value: float | None) -> str:
    """Return at least three digits: `1,234` from 100 on, `12.3` from 10 on, `1.23` below 10."""
    if value is None or pd.isna(value):
        return MISSING
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2  # noqa: PLR2004  powers of ten
    return f"{value:,.{digits}f}"


def ratio_label(value: float | None) -> str:
    """Return a ratio with two decimals: `1.25`."""
    return MISSING if value is None or pd.isna(value) else f"{value:.2f}"


def teraflops_label(flops_per_s: float | None) -> str:
    """Return FLOP/s in units of 10^12."""
    return MISSING if flops_per_s is None else number_label(flops_per_s / 1e12)


def text_label(value: Any) -> str:
    """Return a text unchanged; of any other value return MISSING."""
    return value if isinstance(value, str) else MISSING


def count_label(count: int, noun: str, nouns: str | None = None) -> str:
    """Return `1 cell`, `2 cells`, `100,000 cells`; `nouns` is the plural where it is not `noun` with an s."""
    return f"{count} {noun}" if count == 1 else f"{count:,} {nouns or f'{noun}s'}"


def more_label(count: int, noun: str) -> str:
    """Return the end of a list that is cut: `and 1 more cell`, `and 2 more cells`."""
    return f"and {count_label(count, f'more {noun}')}"


def samples_label(row: Mapping[Any, Any]) -> str:
    """Return the number of samples behind a cell's median: `8` steps or `3 repeats`; empty without any."""
    if pd.isna(row["n"]):
        return ""
    return f"{int(row['n'])} repeats" if row["n_of"] == "repeats" else str(int(row["n"]))


def interval_label(row: Mapping[Any, Any]) -> str:
    """Return the 95 % interval of a cell's tokens/s: `2,390 to 2,470` or `no interval`."""
    if pd.isna(row["n"]):
        return ""
    if pd.isna(row["tokens_per_s_low"]):
        return "no interval"
    return f"{number_label(row['tokens_per_s_low'])} to {number_label(row['tokens_per_s_high'])}"


def spread_label(row: Mapping[Any, Any]) -> str:
    """Return samples and interval of a cell's tokens/s: `n=8, 2,390 to 2,470` or `n=1, no interval`.

    The range over repeats follows if it differs from the interval; empty without samples.
    """
    if pd.isna(row["n"]):
        return ""
    interval = interval_label(row)
    parts = [f"n={samples_label(row)}", interval]
    lowest, highest = row["tokens_per_s_lowest_repeat"], row["tokens_per_s_highest_repeat"]
    repeats = f"{number_label(lowest)} to {number_label(highest)}"
    if pd.notna(lowest) and repeats != interval:  # the interval of six repeats is their whole range
        parts.append(f"repeats {repeats}")
    return ", ".join(parts)


def table_console() -> Console:
    """Return a console for tables, which is PIPE_COLUMNS wide in a pipe or file unless COLUMNS is set."""
    is_sized = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(highlight=False, width=None if is_sized else PIPE_COLUMNS)
