"""Which tokens see which, strategy by strategy and layout by layout: the leak probe's cells and table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.common.environment import Machine
from bench.common.labels import length_label
from bench.config import AUTO, RunConfig
from bench.measure.probe.section import Moved
from bench.record.record import Record
from bench.record.store import write_whole
from bench.request.choices import Raw, read_option
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.strategies.facts import Facts

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
DTYPE = "fp32"
"""Of a strategy that runs in it, where the request leaves the dtype open; else the strategy's own first."""


def probed_cells(raws: Sequence[Raw], machine: Machine) -> list[RunConfig]:
    """A cell for each strategy that packs documents, in each of its layouts.

    Strategies, layouts and dtypes that a request names are taken as they are. Raises ConfigError for an
    invalid value.
    """
    return [resolve(full, machine) for raw in raws for full in _closed(raw)]


def _closed(raw: Raw) -> Iterator[dict[str, Any]]:
    """The request with every choice made."""
    packing = [facts.name for facts in STRATEGIES.usable() if facts.packs and not facts.is_optional]
    named = [raw["strategy"]] if "strategy" in raw else [read_option("strategy", name) for name in packing]
    for strategy in named:
        facts = STRATEGIES.get(strategy["name"])
        layouts: tuple[Any, ...] = (raw["layout"],)
        if facts is not None and raw["layout"] == AUTO:
            layouts = facts.layouts_with(strategy)
        for layout in layouts:
            yield {**raw, "strategy": strategy, "layout": layout, "dtype": raw["dtype"] or _dtype(facts)}


def _dtype(facts: Facts | None) -> str:
    return DTYPE if facts is None or DTYPE in facts.dtypes else facts.dtypes[0]


def write_probe(records: Sequence[Record], folder: Path) -> None:
    """Write probe.md into the folder, and print it; `records` are the lines of the sweep."""
    rows = (HEADS, ["---"] * len(HEADS), *_rows(records))
    table = [f"| {' | '.join(row)} |" for row in rows]
    lines = ["# Leak probe", "", *(f"- {line}" for line in LEGEND), "", *table, "", *_reasons(records)]
    text = "\n".join(lines).rstrip() + "\n"
    write_whole(folder / FILE, text)
    print(text)
    print(f"table: {folder / FILE}")


def _rows(records: Sequence[Record]) -> Iterator[tuple[str, ...]]:
    """A row for each part of each cell that was probed to its end."""
    for record in records:
        section, config = record.probe, record.config
        if section is None:
            continue
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


def _reasons(records: Sequence[Record]) -> Iterator[str]:
    """Yield a line for each record whose cell did not end well."""
    for record in records:
        if record.reason is not None:
            config = record.config
            named = f"{config['strategy']} {config['layout']} {length_label(config['seq_len'])}"
            yield f"- {named} {config['trainer']}: {record.status}: {record.reason}"
