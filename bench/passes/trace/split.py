"""Where one rank's traced step went: a timeline booked, each instant once. No torch.

The order decides what an instant is booked as: compute before communication before device copies, and among
these COMPUTE_PARTS, PURPOSES and COPY_PARTS in their order; what is left is idle. So the parts add up to the
step. A copy hides no communication: it takes none of the units that compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from bench.passes.calls import PURPOSES
from bench.passes.trace.intervals import Spans, intersect, length, spans_of, subtract, union
from bench.passes.trace.timeline import COMPUTE_PARTS, COPY_PARTS, Flight, Timeline

# A ring's hop is one kind to a reader, whichever of its two ends a rank is at.
KIND_LABELS: Mapping[str, str] = {"send": "send_recv", "recv": "send_recv"}


@dataclass(frozen=True, slots=True)
class Split:
    """One rank's step, times in milliseconds.

    `total_ms` is when any communication was in flight, `exposed_ms` the part of it without compute.
    `purpose_total_ms` overlap where communication for two purposes is in flight at once;
    `compute_ms`, `exposed_spans_ms` by purpose, `copies_ms` and `idle_ms` do not. Spans count from the step's
    start.
    """

    step_ms: float
    total_ms: float
    exposed_ms: float
    communication_ms: dict[str, float]
    calls: dict[str, int]
    purpose_total_ms: dict[str, float]
    compute_ms: dict[str, float]
    exposed_spans_ms: dict[str, list[tuple[float, float]]]
    copies_ms: dict[str, float]
    idle_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightTimes:
    """One call in flight."""

    kind: str
    purpose: str
    group: str
    members: list[int]
    ordinal: int
    arrival_us: float
    """By the host's monotonic clock."""
    arrival_ms: float
    """From the step's start, as is `end_ms`."""
    end_ms: float


def split(timeline: Timeline) -> Split:
    """Book every instant of a timeline's step; see the module for the order."""
    start, end = timeline.step
    whole = spans_of([timeline.step])
    by_kind, by_purpose = _in_flight(timeline, whole)
    compute, left = {}, whole
    for part in COMPUTE_PARTS:
        compute[part] = intersect(timeline.compute[part], left)
        left = subtract(left, compute[part])
    exposed = {}
    for purpose in (purpose for purpose in PURPOSES if purpose in by_purpose):
        exposed[purpose] = intersect(by_purpose[purpose], left)
        left = subtract(left, exposed[purpose])
    copies = {}
    for part in (part for part in COPY_PARTS if part in timeline.copies):
        copies[part] = intersect(timeline.copies[part], left)
        left = subtract(left, copies[part])
    return Split(
        step_ms=(end - start) / 1e3,
        total_ms=length(np.concatenate([spans_of([]), *by_kind.values()])) / 1e3,
        exposed_ms=sum(map(length, exposed.values())) / 1e3,
        communication_ms=_lengths_ms(by_kind),
        calls=_calls(timeline),
        purpose_total_ms=_lengths_ms(by_purpose),
        compute_ms=_lengths_ms(compute),
        exposed_spans_ms={
            purpose: [*map(tuple, ((spans - start) / 1e3).tolist())] for purpose, spans in exposed.items()
        },
        copies_ms=_lengths_ms(copies),
        idle_ms=length(left) / 1e3,
    )


def flights_ms(timeline: Timeline) -> list[FlightTimes]:
    """The calls in flight as the launcher needs them, which knows when the other ranks arrived."""
    origin = timeline.step[0]
    return [
        FlightTimes(
            kind=flight.kind,
            purpose=flight.purpose,
            group=flight.group,
            members=list(flight.members),
            ordinal=flight.ordinal,
            arrival_us=flight.arrival,
            arrival_ms=(flight.arrival - origin) / 1e3,
            end_ms=(flight.end - origin) / 1e3,
        )
        for flight in timeline.flights
    ]


def _in_flight(timeline: Timeline, whole: Spans) -> tuple[dict[str, Spans], dict[str, Spans]]:
    """When communication was in flight within the step, by kind and by purpose."""
    kinds, purposes = defaultdict(list), defaultdict(list)
    for flight in timeline.flights:
        kinds[_label(flight)].append((flight.start, flight.end))
        purposes[flight.purpose].append((flight.start, flight.end))
    return (
        {kind: intersect(union(spans), whole) for kind, spans in kinds.items()},
        {purpose: intersect(union(spans), whole) for purpose, spans in purposes.items()},
    )


def _calls(timeline: Timeline) -> dict[str, int]:
    counts: defaultdict[str, int] = defaultdict(int)
    for flight in timeline.flights:
        counts[_label(flight)] += 1
    return dict(counts)


def _label(flight: Flight) -> str:
    return KIND_LABELS.get(flight.kind, flight.kind)


def _lengths_ms(spans: Mapping[str, Spans]) -> dict[str, float]:
    return {name: length(found) / 1e3 for name, found in spans.items()}
