"""The ranks' traced steps as one section of a record. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bench.attention.layouts import LAYOUTS
from bench.config import RunConfig
from bench.cost.area import causal_area
from bench.passes.trace.intervals import length
from bench.passes.trace.waiting import RankTrace, waiting
from bench.record import Trace
from bench.strategies import STRATEGIES


def merge_traces(traces: Sequence[RankTrace], cell: RunConfig) -> Trace:
    """Lists by rank, nothing reduced; waiting needs the arrivals of all ranks, so it is found here."""
    waited = waiting(traces)
    exposed_ms = [
        {purpose: length(spans) for purpose, spans in trace["exposed_spans_ms"].items()} for trace in traces
    ]
    return Trace(
        step_ms=_by_rank(traces, "step_ms"),
        total_ms=_by_rank(traces, "total_ms"),
        exposed_ms=_by_rank(traces, "exposed_ms"),
        communication_ms=_by_name(_by_rank(traces, "communication_ms")),
        calls=_by_name(_by_rank(traces, "calls")),
        purpose_total_ms=_by_name(_by_rank(traces, "purpose_total_ms")),
        purpose_exposed_ms=_by_name(exposed_ms),
        purpose_waiting_ms=None if waited is None else waited.waiting_ms,
        purpose_exposed_waiting_ms=None if waited is None else waited.exposed_ms,
        compute_ms=_by_name(_by_rank(traces, "compute_ms")),
        idle_ms=_by_rank(traces, "idle_ms"),
        causal_area=_areas(cell, len(traces)),
        unjoined=_by_rank(traces, "unjoined"),
    )


def _areas(cell: RunConfig, ranks: int) -> list[int] | None:
    known = cell.strategy in STRATEGIES and cell.layout in LAYOUTS
    return [causal_area(cell, rank % cell.sp_degree) for rank in range(ranks)] if known else None


def _by_name(per_rank: Sequence[dict[str, Any]]) -> dict[str, list[Any]]:
    """A dictionary of lists by rank, zero where a rank has none."""
    names = sorted({name for values in per_rank for name in values})
    return {name: [values.get(name, 0) for values in per_rank] for name in names}


def _by_rank(parts: Sequence[RankTrace], key: str) -> list[Any]:
    return [part[key] for part in parts]
