"""How long ranks waited for one another: their traced steps put side by side after the fact. No torch.

Nothing is exchanged in the step for this: the ranks of a host share a monotonic clock, and those of several
hosts have been compared before and after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.passes.calls import Meeting, meeting
from bench.passes.trace.intervals import Span, length, overlap
from bench.passes.trace.split import FlightTimes, Split


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A rank's clock less rank 0's."""

    us: float
    bound_us: float
    """It may be wrong by so much."""


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
    torch_attention: list[str] = field(default_factory=list)
    """The operators that torch's own `scaled_dot_product_attention` chose, by name."""
    clock_offset_us: float = 0.0
    """Its clock less rank 0's, where they were compared."""
    clock_bound_us: float | None = None
    """How wrong that may be; null where they were not compared."""

    def by_clock_of_rank_0(self, offset: ClockOffset) -> RankTrace:
        """The same, once its clock was compared with that of rank 0."""
        return replace(self, clock_offset_us=offset.us, clock_bound_us=offset.bound_us)


@dataclass(frozen=True, slots=True)
class Waiting:
    """Milliseconds by purpose and rank.

    `waiting_ms` is the latest arrival of those that had to meet minus one's own, `exposed_ms` the part of
    it that is exposed: the rank neither computed nor was anything on its way.
    """

    waiting_ms: dict[str, list[float]]
    exposed_ms: dict[str, list[float]]


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """When a rank came to a meeting."""

    us: float
    """By the clock of rank 0."""
    clock: str
    bound_us: float

    def us_until(self, last: Arrival) -> float:
        """How long it waited for the last; 0 where the comparison of their clocks cannot tell."""
        late_us = last.us - self.us
        unknown_us = 0.0 if last.clock == self.clock else last.bound_us + self.bound_us
        return late_us if late_us > unknown_us else 0.0


def waiting(traces: Sequence[RankTrace]) -> Waiting | str:
    """Waiting of every rank from the traces of all, or why their clocks or calls cannot be compared.

    Of ranks on several hosts lateness that the comparison of their clocks cannot tell from none is none.
    """
    several = len({trace.clock for trace in traces}) > 1
    traces = (
        traces if several else [replace(trace, clock_offset_us=0.0, clock_bound_us=0.0) for trace in traces]
    )
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


def clock_bound_us(traces: Sequence[RankTrace]) -> float | None:
    """The largest error of the ranks' clocks; None where all read the same, or where it is not known."""
    bounds = [trace.clock_bound_us for trace in traces]
    if len({trace.clock for trace in traces}) == 1 or None in bounds:
        return None
    return max(filter(None, bounds), default=0.0)


def _why_unknown(traces: Sequence[RankTrace], arrivals: Mapping[Meeting, list[Arrival]]) -> str | None:
    """Why waiting cannot be known: no part of it is then given out for the whole."""
    if any(trace.clock_bound_us is None for trace in traces):
        return "the ranks' clocks cannot be compared: they run on several hosts"
    for rank, trace in enumerate(traces):
        if trace.unmatched is not None:
            return f"rank {rank}: {trace.unmatched}"
    for (kind, _, members, ordinal), came in arrivals.items():
        if len(came) != len(set(members)):
            ranks = ", ".join(map(str, sorted(set(members))))
            return f"{kind} {ordinal} of ranks {ranks} was found on {len(came)} of them"
    return None


def _arrivals(traces: Sequence[RankTrace]) -> dict[Meeting, list[Arrival]]:
    """When each rank came to each meeting."""
    arrivals: dict[Meeting, list[Arrival]] = {}
    for trace in traces:
        for flight in trace.flights:
            arrivals.setdefault(_meeting(flight), []).append(_arrival(flight, trace))
    return arrivals


def _arrival(flight: FlightTimes, trace: RankTrace) -> Arrival:
    return Arrival(flight.arrival_us - trace.clock_offset_us, trace.clock, trace.clock_bound_us or 0.0)


def _spans_by_purpose(trace: RankTrace, arrivals: Mapping[Meeting, list[Arrival]]) -> dict[str, list[Span]]:
    """When this rank was there and the last one was not."""
    spans: dict[str, list[Span]] = {}
    for flight in trace.flights:
        late_ms = _arrival(flight, trace).us_until(max(arrivals[_meeting(flight)])) / 1e3
        until = min(flight.arrival_ms + late_ms, flight.end_ms)
        spans.setdefault(flight.purpose, []).append((flight.arrival_ms, until))
    return spans


def _meeting(flight: FlightTimes) -> Meeting:
    return meeting(flight.kind, flight.group, tuple(flight.members), flight.ordinal)
