"""The timeline of a rank on CPU cores: torch's operators, and gloo's transfers joined to the tap's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bench.passes.calls import Call
from bench.passes.trace.intervals import Spans, subtract
from bench.passes.trace.issued import issued_calls, paired
from bench.passes.trace.reader import Track
from bench.passes.trace.timeline import (
    MOVEMENTS,
    Flight,
    JoinError,
    Regions,
    Timeline,
    by_part,
    clock_shift_us,
    step_us,
    within,
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


def cpu_timeline(tracks: Mapping[str, Track], regions: Regions, calls: Sequence[Call] | None) -> Timeline:
    """The timeline of a rank on CPU cores and gloo.

    Compute is what `aten::` operators take on the thread that ran the step, less the waits in them: never
    autograd's nodes, nor gloo's own threads, whose copies are part of a transfer. `calls` are the tap's, of
    this step or of one that made the same calls; raises JoinError where it did not. Without calls all
    communication is for purpose `other`.
    """
    operators = tracks["operators"]
    shift, thread = clock_shift_us(tracks["annotations"], regions.clock_marks_ns)
    is_compute = operators.named(lambda name: name.startswith("aten::")) & (operators.thread == thread)
    rows = operators.outermost(np.flatnonzero(is_compute))
    is_movement = operators.named(MOVEMENTS.__contains__)[rows]
    spans = operators.spans[rows] + shift
    compute = by_part(spans, spans[:, 0], is_movement, regions)
    calling = operators.spans[operators.named(lambda name: name.startswith(CALLS))] + shift
    return Timeline(
        step=step_us(regions),
        compute={part: subtract(found, calling) for part, found in compute.items()},
        flights=(
            _unjoined_flights(tracks, regions, shift)
            if calls is None
            else _gloo_flights(tracks, regions, calls, shift)
        ),
    )


def _gloo_flights(
    tracks: Mapping[str, Track], regions: Regions, calls: Sequence[Call], shift: float
) -> list[Flight]:
    """The tap's k-th call of a kind, the k-th `c10d::` event of it and the k-th of gloo's, joined.

    The `c10d::` event says when this rank arrived, gloo's how long the transfer took.
    """
    if unknown := {call.kind for call in calls} - GLOO_EVENTS.keys():
        raise JoinError(f"nobody knows what gloo calls the transfers of {', '.join(sorted(unknown))}")
    pairs = paired(issued_calls(tracks["operators"], regions, shift), calls)
    asked = [(issued.start, call) for found in pairs.values() for issued, call in found]
    transfers = _transfers(tracks["annotations"], regions, shift)
    flights = []
    for event, spans in transfers.items():
        mine = sorted((a for a in asked if GLOO_EVENTS[a[1].kind] == event), key=lambda pair: pair[0])
        if len(mine) != len(spans):
            raise JoinError(f"{len(mine)} calls, {len(spans)} transfers named {event}")
        flights += [
            Flight(
                call.kind,
                call.purpose,
                call.group,
                call.members,
                call.ordinal,
                arrival,
                float(start),
                float(end),
            )
            for (arrival, call), (start, end) in zip(mine, spans, strict=True)
        ]
    return flights


def _unjoined_flights(tracks: Mapping[str, Track], regions: Regions, shift: float) -> list[Flight]:
    """Gloo's transfers by kind alone, ranks unknown."""
    kinds = {event: kind for kind, event in GLOO_EVENTS.items() if kind != "reduce_scatter"}
    return [
        Flight(kinds[event], "other", "", (), number, float(start), float(start), float(end))
        for event, spans in _transfers(tracks["annotations"], regions, shift).items()
        for number, (start, end) in enumerate(spans)
    ]


def _transfers(annotations: Track, regions: Regions, shift: float) -> dict[str, Spans]:
    """Gloo's events of the step by name, in order of their starts."""
    found = {}
    for event in dict.fromkeys(GLOO_EVENTS.values()):
        spans = annotations.spans[annotations.named(event.__eq__)] + shift
        spans = spans[np.argsort(spans[:, 0])]
        found[event] = spans[[within(start, regions) for start in spans[:, 0]]] if len(spans) else spans
    return found
