"""Implementations beside one another: JSON and Markdown in the sweep's folder, and on the terminal."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.attention.kernel_facts import FLASH_ATTN
from bench.config import RunConfig
from bench.experiments.implementations import counterpart_of, label_of
from bench.experiments.markdown import table, write
from bench.labels import MIB, length_label
from bench.passes.attention.section import ULPS
from bench.record import Status
from bench.statistics import ratio_interval, slowest_median
from bench.store import write_whole
from bench.strategies import STRATEGIES

FILE, TABLE = "implementations.json", "implementations.md"
HEADINGS = (
    "implementation", "compared with", "ms", "its time / that (95 % interval)", "sends, MiB", "peak, MiB",
    "error of out, ulps", "of gradients, ulps",
)  # fmt: skip
SETTING = itemgetter("ranks", "seq_len", "num_heads", "num_kv_heads", "dtype")
GRADIENTS = ("dq", "dk", "dv")
NOTE = (
    "A call is attention forward and backward on a shard, as slow as its slowest rank. Inputs are laid out in"
    " memory as in a model. Each is timed in fresh processes, in turns. Times are medians over processes of"
    " the median call; where a ratio is above 1, what it is compared with is faster. Ours in it: what our way"
    " to call the package adds to its call, timed alone; the package's users do not pay for it. Stand-in: our"
    " functions under flash-attn's names, which copy gradients that flash-attn writes in place. Sends: what"
    " the rank that sends most hands to others. Peak: tensors"
    " beyond the inputs. Errors at no more than 512 tokens, against float64, in units of the last place of"
    " the exact tensor's largest element."
)
Row = Mapping[str, Any]


def write_implementations(records: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write both files into the folder, and print the table; `records` are the lines of the sweep."""
    rows = rows_of(records)
    kept = {"environment": records[0]["environment"], "rows": rows}
    write_whole(folder / FILE, json.dumps(kept, indent=1) + "\n")
    write("\n".join([*markdown(rows), NOTE, ""]), folder / TABLE)


def rows_of(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each cell over all its processes; one that failed in any has the reason and no numbers."""
    last = {(record["cell_id"], record["repeat"]): record for record in records}
    processes: dict[str, list[Mapping[str, Any]]] = {}
    for (cell_id, _), record in last.items():
        processes.setdefault(cell_id, []).append(record)
    calls_ms = {
        cell_id: [slowest_median(record["timing"]["step_times_ms"]) for record in its]
        for cell_id, its in processes.items()
        if all(record["status"] == Status.OK for record in its)
    }
    return [_row(its, calls_ms) for its in processes.values()]


def _row(records: Sequence[Mapping[str, Any]], calls_ms: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    first, cell = records[0], RunConfig.from_flat(records[0]["config"])
    facts = STRATEGIES[cell.strategy]
    package = facts.package
    own_ms = calls_ms.get(first["cell_id"], [])
    ours = counterpart_of(cell) if own_ms else None
    ours_ms = calls_ms.get(ours.cell_id, []) if ours else []
    added = [record["attention"]["added_ms"] for record in records] if own_ms else []
    ratio, interval = ratio_interval(own_ms, ours_ms) if ours_ms else (None, None)
    return {
        "ranks": cell.cluster.world_size,
        "seq_len": cell.seq_len,
        "num_heads": cell.model.num_heads,
        "num_kv_heads": cell.model.num_kv_heads,
        "dtype": cell.dtype,
        "implementation": label_of(cell),
        "package": package and f"{package} {first['environment']['packages'].get(package)}",
        "counterpart": ours and label_of(ours),
        "reason": next(
            (each["reason"] or each["status"] for each in records if each["status"] != Status.OK), None
        ),
        "stand_in": facts.calls_flash_attn and cell.kernel != FLASH_ATTN,
        "call_ms": own_ms,
        "added_ms": [*map(slowest_median, added)] if added and None not in added else None,
        "ratio": ratio,
        "interval": interval and [interval.low, interval.high],
        "ours_is_slower": package is not None and interval is not None and interval.high < 1,
        **dict.fromkeys(("sent_bytes", "peak_bytes", "error_ulps")),
        **(_found(first, cell.dtype) if own_ms else {}),
    }


def _found(record: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """What does not vary from process to process."""
    memory, sent = record["memory"], record["engagement"]["sent_bytes"].values()
    peaks = zip(
        *(memory[f"{name}_bytes"] for name in ("forward_taken", "forward_kept", "backward_taken")),
        strict=True,
    )
    errors = record["parity"]["errors"]
    return {
        "sent_bytes": max(map(sum, zip(*sent, strict=True)), default=0),
        "peak_bytes": max(max(forward, kept + backward) for forward, kept, backward in peaks),
        "error_ulps": {name: error / ULPS[dtype] for name, error in errors.items()},
    }


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    """All lines, a heading and a table for each setting."""
    for setting, its in groupby(sorted(rows, key=SETTING), key=SETTING):
        ranks, seq_len, heads, kv_heads, dtype = setting
        of_heads = f"{heads} query and {kv_heads} KV heads"
        yield f"### {ranks} ranks, {length_label(seq_len)} tokens, {of_heads}, {dtype}\n"
        ranked = sorted(its, key=lambda row: row["reason"] is not None)
        yield from table(HEADINGS, map(_cells, ranked))
        yield ""


def _cells(row: Row) -> list[str]:
    if row["reason"] is not None:
        return [f"`{row['implementation']}`", f"did not run: {row['reason']}", *[""] * (len(HEADINGS) - 2)]
    ulps, added_ms = row["error_ulps"], row["added_ms"]
    stand_in = ", on our stand-in for flash-attn" if row["stand_in"] else ""
    return [
        f"`{row['implementation']}`" + (f" ({row['package']}{stand_in})" if row["package"] else ""),
        f"`{row['counterpart']}`" if row["counterpart"] else "",
        f"{statistics.median(row['call_ms']):.1f}"
        + (f", ours in it {statistics.median(added_ms):.1f}" if added_ms else ""),
        _ratio(row),
        f"{row['sent_bytes'] / MIB:.3g}",
        f"{row['peak_bytes'] / MIB:.3g}",
        f"{ulps['out']:.2g}" if "out" in ulps else "",
        f"{max(ulps[name] for name in GRADIENTS):.2g}" if "dq" in ulps else "",
    ]


def _ratio(row: Row) -> str:
    """With what it says of ours beside a package."""
    if row["ratio"] is None:
        return ""
    shown = f"{row['ratio']:.2f}"
    if row["interval"] is None:
        return f"{shown}, n={len(row['call_ms'])}"
    low, high = row["interval"]
    shown = f"{shown} ({low:.2f} to {high:.2f}), n={len(row['call_ms'])}"
    if row["package"] is None:
        return shown
    if row["ours_is_slower"]:
        return f"{shown}: ours is slower by {1 / row['ratio'] - 1:.1%}"
    return f"{shown}: {'ours is faster' if low > 1 else 'no clear difference'}"
