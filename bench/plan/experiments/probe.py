"""Which tokens see which, strategy by strategy and layout by layout: the cells of the leak probe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.common.environment import Machine
from bench.config import AUTO, Cell
from bench.request.choices import Raw, read_option
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.strategies.facts import StrategyFacts

DTYPE = "fp32"
"""Of a strategy that runs in it, where the request leaves the dtype open; else the strategy's own first."""


def probed_cells(raws: Sequence[Raw], machine: Machine) -> list[Cell]:
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


def _dtype(facts: StrategyFacts | None) -> str:
    return DTYPE if facts is None or DTYPE in facts.dtypes else facts.dtypes[0]
