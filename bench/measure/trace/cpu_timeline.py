"""The timeline of a rank on CPU cores: torch's operators, and gloo's transfers joined to the tap's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bench.measure.calls import CollectiveCall
from bench.measure.trace.intervals import Spans, subtract
from bench.measure.trace.reader import Track
from bench.measure.trace.timeline import (
    CLOCK_MARK,
    MOVEMENTS,
    Flight,
    Issued,
    JoinError,
    Regions,
    Timeline,
    by_part,
    paired,
    unknown_call,
)

CALLS = ("c10d::", "_c10d_functional::", "deepspeed::dim_zero_all_to_all")
"""Operators that ask for communication or wait for it; DTensor's wait inside operators that calculate."""

GLOO_EVENTS: Mapping[str, str] = {
    "all_to_all": "gloo:all_to_all",
    "all_gather": "gloo:all_gather",
    "all_reduce": "gloo:all_reduce",
    "reduce_scatter": "gloo:all_reduce",  # gloo has none of its own
    "broadcast": "gloo:broadcast",
    "reduce": "gloo:reduce",
    "gather": "gloo:gather",
    "scatter": "gloo:scatter",
    "send": "gloo:send",
    "recv": "gloo:recv",
    "recv_any_source": "gloo:recvAnySource",
    "barrier": "gloo:barrier",
}
"""What gloo's worker threads call the transfer that a call of this kind asks for."""


def cpu_timeline(
    tracks: Mapping[str, Track],
    regions: Regions,
    issued: Mapping[str, Sequence[Issued]],
    calls: Sequence[CollectiveCall],
) -> Timeline:
    """The timeline of a rank on CPU cores and gloo.

    Compute is what `aten::` operators take on the thread that ran the step, less the waits in them: never
    autograd's nodes, nor gloo's own threads, whose copies are part of a transfer. `calls` are the tap's, of
    this step or of one that made the same calls; where it did not, all communication is for purpose `other`,
    and the timeline says why.
    """
    operators, annotations = tracks["operators"], tracks["annotations"]
    thread = annotations.thread[annotations.named(CLOCK_MARK.__eq__)][0]
    is_compute = operators.named(lambda name: name.startswith("aten::")) & (operators.thread == thread)
    rows = operators.outermost(np.flatnonzero(is_compute))
    spans = operators.spans[rows]
    compute = by_part(spans, spans[:, 0], operators.named(MOVEMENTS.__contains__)[rows], regions)
    calling = operators.spans[operators.named(lambda name: name.startswith(CALLS))]
    transfers, purposes_unknown = _transfers(annotations, regions), None
    try:
        flights = _joined_flights(transfers, paired(issued, calls))
    except JoinError as error:
        flights, purposes_unknown = _unjoined_flights(transfers), str(error)
    return Timeline(
        step=regions.step_us,
        compute={part: subtract(found, calling) for part, found in compute.items()},
        flights=flights,
        unmatched=purposes_unknown,
        purposes_unknown=purposes_unknown,
    )


def _transfers(annotations: Track, regions: Regions) -> dict[str, Spans]:
    """Gloo's events of the step by name, in order of their starts."""
    found = {}
    for event in dict.fromkeys(GLOO_EVENTS.values()):
        spans = annotations.spans[annotations.named(event.__eq__)]
        spans = spans[np.argsort(spans[:, 0])]
        found[event] = spans[[regions.hold(start) for start in spans[:, 0]]] if len(spans) else spans
    return found


def _joined_flights(
    transfers: Mapping[str, Spans], pairs: Sequence[tuple[Issued, CollectiveCall]]
) -> list[Flight]:
    """The tap's k-th call of a kind, the k-th `c10d::` event of it and the k-th of gloo's, joined.

    The `c10d::` event says when this rank arrived, gloo's how long the transfer took.
    """
    flights = []
    for event, spans in transfers.items():
        mine = sorted((p for p in pairs if GLOO_EVENTS[p[1].kind] == event), key=lambda p: p[0].start)
        if len(mine) != len(spans):
            raise JoinError(f"{len(mine)} calls, {len(spans)} transfers named {event}")
        flights += [
            Flight(call, issued.start, start, end)
            for (issued, call), (start, end) in zip(mine, spans.tolist(), strict=True)
        ]
    return flights


def _unjoined_flights(transfers: Mapping[str, Spans]) -> list[Flight]:
    """Gloo's transfers by kind alone, ranks unknown."""
    kinds = {event: kind for kind, event in GLOO_EVENTS.items() if kind != "reduce_scatter"}
    return [
        Flight(unknown_call(kinds[event], "other", number), start, start, end)
        for event, spans in transfers.items()
        for number, (start, end) in enumerate(spans.tolist())
    ]
