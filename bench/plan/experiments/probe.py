"""Cells of experiment=probe, which tests for each strategy and layout which tokens a token attends to."""

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


def probed_cells(requests: Sequence[Raw], machine: Machine) -> list[Cell]:
    """Return a cell for each strategy that packs documents, in each of its layouts.

    A strategy, layout or dtype that a request names is the only one. Raises ConfigError for an invalid value.
    """
    return [resolve(complete, machine) for request in requests for complete in _with_choices_made(request)]


def _with_choices_made(request: Raw) -> Iterator[dict[str, Any]]:
    """Yield the request for each strategy and layout, with its dtype."""
    names = [
        facts.name for facts in STRATEGIES.usable() if facts.supports_documents and not facts.is_optional
    ]
    strategies = (
        [request["strategy"]] if "strategy" in request else [read_option("strategy", name) for name in names]
    )
    for strategy in strategies:
        facts = STRATEGIES.get(strategy["name"])
        layouts: tuple[Any, ...] = (request["layout"],)
        if facts is not None and request["layout"] == AUTO:
            layouts = facts.layouts_with(strategy)
        for layout in layouts:
            dtype = request["dtype"] or _default_dtype(facts)
            yield {**request, "strategy": strategy, "layout": layout, "dtype": dtype}


def _default_dtype(facts: StrategyFacts | None) -> str:
    return PREFERRED_DTYPE if facts is None or PREFERRED_DTYPE in facts.dtypes else facts.dtypes[0]
