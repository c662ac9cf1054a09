"""Timeline of a CPU rank: torch's operators are its compute, and gloo's events its communication.

gloo's events state when communication was in flight. The tap, which records the calls of the inspected step,
states their purposes and ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from bench.measure.calls import CollectiveCall
from bench.measure.trace.intervals import Spans, subtract
from bench.measure.trace.reader import Track
from bench.measure.trace.timeline import (
    CLOCK_MARK,
    MOVEMENT_OPERATORS,
    CommunicationSpan,
    IssuedCall,
    MatchError,
    StepRegions,
    Timeline,
    pair_calls,
    placeholder_call,
    spans_by_part,
)

COMMUNICATION_PREFIXES = ("c10d::", "_c10d_functional::", "deepspeed::dim_zero_all_to_all")
"""Prefixes of the names of operators that start communication or wait for it. Their time is taken out of the
compute operators around them, because DTensor waits inside compute operators."""

GLOO_EVENTS: Mapping[str, str] = {
    "all_to_all": "gloo:all_to_all",
    "all_gather": "gloo:all_gather",
    "all_reduce": "gloo:all_reduce",
    "reduce_scatter": "gloo:all_reduce",  # gloo has no reduce-scatter
    "broadcast": "gloo:broadcast",
    "reduce": "gloo:reduce",
    "gather": "gloo:gather",
    "scatter": "gloo:scatter",
    "send": "gloo:send",
    "recv": "gloo:recv",
    "recv_any_source": "gloo:recvAnySource",
    "barrier": "gloo:barrier",
}
"""Name of the trace event in which a gloo worker thread carries out a call, by the kind of the call."""


def cpu_timeline(
    tracks: Mapping[str, Track],
    regions: StepRegions,
    issued: Mapping[str, Sequence[IssuedCall]],
    calls: Sequence[CollectiveCall],
) -> Timeline:
    """Return the timeline of a CPU rank on gloo.

    Compute is the time of `aten::` operators on the thread that ran the step, less the communication calls
    and waits inside them. Autograd nodes do not count as compute. Neither do copies on gloo's threads, which
    are part of the communication. If the calls of trace and tap do not match, all communication has the
    purpose `other` and the timeline states the reason.

    Args:
        tracks: Events of the trace on the host's monotonic clock.
        regions: Spans of the step, and of attention and the optimizer in it.
        issued: Calls of the step in the trace, by kind.
        calls: Calls that the tap recorded in the inspected step, which should make the same calls.
    """
    operators, annotations = tracks["operators"], tracks["annotations"]
    thread = annotations.thread[annotations.name_mask(CLOCK_MARK.__eq__)][0]
    is_compute = operators.name_mask(lambda name: name.startswith("aten::")) & (operators.thread == thread)
    rows = operators.outermost(np.flatnonzero(is_compute))
    spans = operators.spans[rows]
    compute = spans_by_part(
        spans, spans[:, 0], operators.name_mask(MOVEMENT_OPERATORS.__contains__)[rows], regions
    )
    communicating = operators.spans[operators.name_mask(lambda name: name.startswith(COMMUNICATION_PREFIXES))]
    gloo_events, purposes_unknown = _gloo_events(annotations, regions), None
    try:
        communications = _match_events(gloo_events, pair_calls(issued, calls))
    except MatchError as error:
        communications, purposes_unknown = _unmatched_events(gloo_events), str(error)
    return Timeline(
        step=regions.step_us,
        compute={part: subtract(spans, communicating) for part, spans in compute.items()},
        communications=communications,
        unmatched=purposes_unknown,
        purposes_unknown=purposes_unknown,
    )


def _gloo_events(annotations: Track, regions: StepRegions) -> dict[str, Spans]:
    """Return the spans of the step's gloo events by name, sorted by start."""
    by_name = {}
    for event in dict.fromkeys(GLOO_EVENTS.values()):
        spans = annotations.spans[annotations.name_mask(event.__eq__)]
        spans = spans[np.argsort(spans[:, 0])]
        by_name[event] = spans[[regions.contains(start) for start in spans[:, 0]]] if len(spans) else spans
    return by_name


def _match_events(
    gloo_events: Mapping[str, Spans], pairs: Sequence[tuple[IssuedCall, CollectiveCall]]
) -> list[CommunicationSpan]:
    """Return each call with the gloo event that carried it out: the k-th of its name for the k-th call.

    The rank arrives when the `c10d::` operator starts; the call is in flight from start to end of the event.
    """
    communications = []
    for event, spans in gloo_events.items():
        of_event = sorted((p for p in pairs if GLOO_EVENTS[p[1].kind] == event), key=lambda p: p[0].start)
        if len(of_event) != len(spans):
            raise MatchError(f"the trace has {len(of_event)} calls and {len(spans)} events named {event}")
        communications += [
            CommunicationSpan(call, issued.start, start, end)
            for (issued, call), (start, end) in zip(of_event, spans.tolist(), strict=True)
        ]
    return communications


def _unmatched_events(gloo_events: Mapping[str, Spans]) -> list[CommunicationSpan]:
    """Return each gloo event as communication of the purpose `other`, without the ranks that take part."""
    kinds = {event: kind for kind, event in GLOO_EVENTS.items() if kind != "reduce_scatter"}
    return [
        CommunicationSpan(placeholder_call(kinds[event], "other", number), start, start, end)
        for event, spans in gloo_events.items()
        for number, (start, end) in enumerate(spans.tolist())
    ]
