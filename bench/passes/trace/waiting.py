"""How long ranks waited for one another: their traced steps put side by side after the fact. No torch.

Nothing is exchanged in the step for this: the ranks of a host share a monotonic clock. Ranks of several
hosts do not, so there is no waiting to be had from their traces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.passes.calls import Meeting, meeting
from bench.passes.trace.intervals import Span, length, overlap
from bench.passes.trace.split import FlightTimes, Split


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank's traced step, for the launcher to put beside the others'."""

    split: Split
    flights: list[FlightTimes]
    clock: str
    """Ranks with the same one read one monotonic clock."""
    unjoined: str | None
    """Why the calls could not be told apart by purpose; null where they could."""
    unmatched: str | None
    """Why they cannot be put beside those of other ranks; null where they can."""
    other_calls: str | None
    """What the step called more or less often than the inspected one; null where it made the same calls."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Milliseconds by purpose and rank.

    `waiting_ms` is the latest arrival of those that had to meet minus one's own, `exposed_ms` the part of
    it that is exposed: the rank neither computed nor was anything on its way.
    """

    waiting_ms: dict[str, list[float]]
    exposed_ms: dict[str, list[float]]


def waiting(traces: Sequence[RankTrace]) -> Waiting | str:
    """Waiting of every rank from the traces of all, or why their clocks or calls cannot be compared."""
    arrivals = _arrivals(traces)
    if (why := _why_unknown(traces, arrivals)) is not None:
        return why
    spans = [_spans_by_purpose(trace, arrivals) for trace in traces]
    purposes = sorted({purpose for trace in traces for purpose in trace.split.purpose_total_ms})
    return Waiting(
        {purpose: [length(mine.get(purpose, [])) for mine in spans] for purpose in purposes},
        {
            purpose: [
                overlap(mine.get(purpose, []), trace.split.exposed_spans_ms.get(purpose, []))
                for mine, trace in zip(spans, traces, strict=True)
            ]
            for purpose in purposes
        },
    )


def _why_unknown(traces: Sequence[RankTrace], arrivals: Mapping[Meeting, list[float]]) -> str | None:
    """Why waiting cannot be known: no part of it is then given out for the whole."""
    if len({trace.clock for trace in traces}) > 1:
        return "the ranks' clocks cannot be compared: they run on several hosts"
    for rank, trace in enumerate(traces):
        if trace.unmatched is not None:
            return f"rank {rank}: {trace.unmatched}"
    for (kind, _, members, ordinal), came in arrivals.items():
        if len(came) != len(set(members)):
            ranks = ", ".join(map(str, sorted(set(members))))
            return f"{kind} {ordinal} of ranks {ranks} was found on {len(came)} of them"
    return None


def _arrivals(traces: Sequence[RankTrace]) -> dict[Meeting, list[float]]:
    """When each rank came to each meeting."""
    arrivals: dict[Meeting, list[float]] = {}
    for trace in traces:
        for flight in trace.flights:
            arrivals.setdefault(_meeting(flight), []).append(flight.arrival_us)
    return arrivals


def _spans_by_purpose(trace: RankTrace, arrivals: Mapping[Meeting, list[float]]) -> dict[str, list[Span]]:
    """When this rank was there and the last one was not."""
    spans: dict[str, list[Span]] = {}
    for flight in trace.flights:
        late_ms = (max(arrivals[_meeting(flight)]) - flight.arrival_us) / 1e3
        until = min(flight.arrival_ms + late_ms, flight.end_ms)
        spans.setdefault(flight.purpose, []).append((flight.arrival_ms, until))
    return spans


def _meeting(flight: FlightTimes) -> Meeting:
    return meeting(flight.kind, flight.group, tuple(flight.members), flight.ordinal)
