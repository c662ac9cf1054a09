"""The leak probe as a table: Markdown in the sweep's folder, and on the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.passes.probe.section import Moved, Probe

FILE = "probe.md"
HEADS = (
    "strategy", "layout", "ranks", "dtype", "in", "other outputs", "other gradients", "earlier outputs",
    "own outputs", "loss off by", "limit",
)  # fmt: skip
LEGEND = (
    "Positions that moved when one token changed, of those looked at, added up over all changes and ranks.",
    "other: of other documents, none may move. earlier: of the same document, before the token; none may.",
    "own: from the token on, which should move. `model` is the whole; a kind of layer is run by itself.",
    "loss: the largest error of a position's loss against float64 on one device, relative to the mean loss.",
)


def write_probe(records: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write probe.md into the folder, and print the table; `records` are the lines of the sweep."""
    rows, reasons = [*_rows(records)], [*_reasons(records)]
    (folder / FILE).write_text(markdown_text(rows, reasons), encoding="utf-8")
    print(markdown_text(rows, reasons))
    print(f"table: {folder / FILE}")


def markdown_text(rows: Sequence[Sequence[str]], reasons: Sequence[str]) -> str:
    """The table with its legend, and why the cells that have no row have none."""
    lines = ["# Leak probe", "", *(f"- {line}" for line in LEGEND), ""]
    lines += [f"| {' | '.join(row)} |" for row in (HEADS, ["---"] * len(HEADS), *rows)]
    return "\n".join([*lines, "", *(f"- {reason}" for reason in reasons)]).rstrip() + "\n"


def _rows(records: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """A row for each part of each cell that was probed to its end."""
    for record in records:
        if record.get("probe") is None:
            continue
        section, config = msgspec.convert(record["probe"], Probe), record["config"]
        named = (config["strategy"], config["layout"], str(config["sp_degree"]), config["dtype"])
        for kind, moved in section.moved.items():
            loss = (f"{section.loss_error:.1e}", f"{section.loss_limit:.1e}") if kind == "model" else ("", "")
            yield (*named, kind, *_counts(moved), *loss)


def _counts(moved: Moved) -> tuple[str, ...]:
    pairs = (
        (moved.other_outputs, moved.of_other),
        (moved.other_gradients, moved.of_other),
        (moved.earlier_outputs, moved.of_earlier),
        (moved.own_outputs, moved.of_own),
    )
    return tuple(f"{count:,} of {of:,}" for count, of in pairs)


def _reasons(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for record in records:
        if record["reason"] is not None:
            config = record["config"]
            yield f"{config['strategy']} {config['layout']}: {record['status']}: {record['reason']}"
