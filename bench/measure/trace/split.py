"""Where one rank's traced step went: a timeline booked, each instant once. No torch.

The order decides what an instant is booked as: compute before communication before device copies, and among
these COMPUTE_PARTS, PURPOSES and COPY_PARTS in their order; what is left is idle. So the parts add up to the
step. A copy hides no communication: it takes none of the units that compute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.measure.calls import PURPOSES
from bench.measure.trace.intervals import Spans, intersect, length, spans_of, subtract
from bench.measure.trace.timeline import COMPUTE_PARTS, COPY_PARTS, Timeline


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


def split(timeline: Timeline) -> Split:
    """Book every instant of a timeline's step; see the module for the order."""
    start, end = timeline.step
    whole = spans_of([timeline.step])
    kinds, purposes = defaultdict(list), defaultdict(list)
    for flight in timeline.flights:
        # A ring's hop is one kind to a reader, whichever of its two ends a rank is at.
        kinds[flight.call.meeting[0]].append((flight.start, flight.end))
        purposes[flight.call.purpose].append((flight.start, flight.end))
    by_kind, by_purpose = (
        {name: intersect(spans, whole) for name, spans in found.items()} for found in (kinds, purposes)
    )
    compute, left = _booked(timeline.compute, COMPUTE_PARTS, whole)
    exposed, left = _booked(by_purpose, PURPOSES, left)
    copies, left = _booked(timeline.copies, COPY_PARTS, left)
    return Split(
        step_ms=(end - start) / 1e3,
        total_ms=length(np.concatenate([spans_of([]), *by_kind.values()])) / 1e3,
        exposed_ms=sum(map(length, exposed.values())) / 1e3,
        communication_ms=_lengths_ms(by_kind),
        calls={kind: len(spans) for kind, spans in kinds.items()},
        purpose_total_ms=_lengths_ms(by_purpose),
        compute_ms=_lengths_ms(compute),
        exposed_spans_ms={
            purpose: [*map(tuple, ((spans - start) / 1e3).tolist())] for purpose, spans in exposed.items()
        },
        copies_ms=_lengths_ms(copies),
        idle_ms=length(left) / 1e3,
    )


def _booked(claims: Mapping[str, Spans], order: Sequence[str], left: Spans) -> tuple[dict[str, Spans], Spans]:
    """What each claim, in this order, gets of the spans that are left, and what is left then."""
    booked = {}
    for name in (name for name in order if name in claims):
        booked[name] = intersect(claims[name], left)
        left = subtract(left, booked[name])
    return booked, left


def _lengths_ms(spans: Mapping[str, Spans]) -> dict[str, float]:
    return {name: length(found) / 1e3 for name, found in spans.items()}
