"""A comparison as Markdown: a table a setting, and what did not run; and the files that keep it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.compare_implementations.comparison import Row
from bench.labels import MIB, length_label
from bench.store import write_whole

FILE, TABLE = "implementations.json", "implementations.md"

HEADINGS = (
    "implementation", "held against", "ms", "its time / that (95 % interval)", "sends, MiB", "peak, MiB",
    "error of out, ulps", "of gradients, ulps",
)  # fmt: skip
GRADIENTS = ("dq", "dk", "dv")
NOTE = (
    "A call is attention forward and backward on a shard, as slow as its slowest rank. All take turns in one"
    " set of processes, and every set is a fresh one. Times are medians over sets; a ratio is the median over"
    " sets of the median over rounds, and above 1 what it is held against is faster. Sends: what the rank"
    " that sends most hands to others. Peak: tensors beyond the inputs. Errors at no more than 512 tokens,"
    " against float64, in units of the last place of the exact tensor's largest element."
)


def markdown(rows: Sequence[Row]) -> list[str]:
    """All lines, a heading and a table for each setting."""
    lines = list[str]()
    for setting, its in groupby(rows, key=_setting):
        lines += [f"### {setting}", "", *_table([*its]), ""]
    return lines


def write(folder: Path, environment: Mapping[str, Any], rows: Sequence[Row]) -> None:
    """Keep all rows so far, as FILE for programs and as TABLE."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {"environment": dict(environment), "rows": [asdict(row) for row in rows]}
    write_whole(folder / FILE, (json.dumps(kept, indent=1) + "\n").encode())
    write_whole(folder / TABLE, "\n".join([*markdown(rows), NOTE, ""]).encode())


def _setting(row: Row) -> str:
    heads = f"{row.num_heads} query and {row.num_kv_heads} KV heads"
    return f"{row.ranks} ranks, {length_label(row.seq_len)} tokens, {heads}, {row.dtype}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield _line(HEADINGS)
    yield _line(["---"] * len(HEADINGS))
    for row in rows:
        if row.reason is None:
            yield _line(_cells(row))
    for row in rows:
        if row.reason is not None:
            yield _line(
                [f"`{row.implementation}`", f"did not run: {row.reason}", *[""] * (len(HEADINGS) - 2)]
            )


def _cells(row: Row) -> list[str]:
    ulps = row.error_ulps or {}
    return [
        f"`{row.implementation}`" + (f" ({row.package})" if row.package else ""),
        f"`{row.counterpart}`" if row.counterpart else "",
        f"{statistics.median(row.call_ms):.1f}" if row.call_ms else "",
        _ratio(row),
        "" if row.sent_bytes is None else f"{row.sent_bytes / MIB:.3g}",
        "" if row.peak_bytes is None else f"{row.peak_bytes / MIB:.3g}",
        f"{ulps['out']:.2g}" if "out" in ulps else "",
        f"{max(ulps[name] for name in GRADIENTS):.2g}" if "dq" in ulps else "",
    ]


def _ratio(row: Row) -> str:
    if not row.ratios:
        return ""
    interval = row.interval
    shown = f"{statistics.median(row.ratios):.2f}"
    if interval is None:
        return f"{shown}, n={len(row.ratios)}"
    verdict = "" if row.verdict is None else f": {row.verdict}"
    return f"{shown} ({interval.low:.2f} to {interval.high:.2f}), n={len(row.ratios)}{verdict}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
