"""Cells of experiment=probe, which tests the tokens that attention sees, for each strategy and layout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from bench.common.environment import Machine
from bench.config import AUTO, Cell
from bench.request.choices import Raw, read_option
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.strategies.facts import StrategyFacts

PREFERRED_DTYPE = "fp32"
"""Dtype if the request names none and the strategy runs in it; otherwise it is the strategy's first dtype."""


def probed_cells(raws: Sequence[Raw], machine: Machine) -> list[Cell]:
    """Return a cell for each strategy that packs documents, in each of its layouts.

    A strategy, layout or dtype in a request replaces these choices. Raises ConfigError for an invalid value.
    """
    return [resolve(full, machine) for raw in raws for full in _with_choices_made(raw)]


def _with_choices_made(raw: Raw) -> Iterator[dict[str, Any]]:
    """Yield the request with every choice made."""
    names = [
        facts.name for facts in STRATEGIES.usable() if facts.supports_documents and not facts.is_optional
    ]
    strategies = [raw["strategy"]] if "strategy" in raw else [read_option("strategy", name) for name in names]
    for strategy in strategies:
        facts = STRATEGIES.get(strategy["name"])
        layouts: tuple[Any, ...] = (raw["layout"],)
        if facts is not None and raw["layout"] == AUTO:
            layouts = facts.layouts_with(strategy)
        for layout in layouts:
            dtype = raw["dtype"] or _default_dtype(facts)
            yield {**raw, "strategy": strategy, "layout": layout, "dtype": dtype}


def _default_dtype(facts: StrategyFacts | None) -> str:
    return PREFERRED_DTYPE if facts is None or PREFERRED_DTYPE in facts.dtypes else facts.dtypes[0]
