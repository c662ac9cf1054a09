"""How long ranks waited for one another: their traced steps put side by side after the fact. No torch.

Nothing is exchanged in the step for this: the ranks of a host share a monotonic clock, and those of several
hosts have been compared before and after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.measure.calls import Meeting
from bench.measure.trace.intervals import Span, intersect, length
from bench.measure.trace.split import Split
from bench.measure.trace.timeline import Flight


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
    start_us: float
    """When the step began, by the host's monotonic clock as all times of `flights`."""
    flights: list[Flight]
    clock: str
    """Ranks with the same one read one monotonic clock."""
    purposes_unknown: str | None
    """Why the calls could not be told apart by purpose; null where they could."""
    unmatched: str | None
    """Why they cannot be put beside those of other ranks; null where they can."""
    call_differences: str | None
    """What the step called more or less often than the inspected one; null where it made the same calls."""
    torch_attention: list[str] = field(default_factory=list)
    """The operators that torch's own `scaled_dot_product_attention` chose, by name."""
    offset: ClockOffset | None = None
    """How far its clock is from that of rank 0, where they were compared."""


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

    @classmethod
    def of(cls, flight: Flight, trace: RankTrace) -> Arrival:
        offset = trace.offset or ClockOffset(0.0, 0.0)
        return cls(flight.arrival - offset.us, trace.clock, offset.bound_us)

    def us_until(self, last: Arrival) -> float:
        """How long it waited for the last; 0 where the comparison of their clocks cannot tell."""
        late_us = last.us - self.us
        unknown_us = 0.0 if last.clock == self.clock else last.bound_us + self.bound_us
        return late_us if late_us > unknown_us else 0.0


def waiting(traces: Sequence[RankTrace]) -> Waiting | str:
    """Waiting of every rank from the traces of all, or why their clocks or calls cannot be compared.

    Of ranks on several hosts lateness that the comparison of their clocks cannot tell from none is none.
    """
    if len({trace.clock for trace in traces}) == 1:
        traces = [replace(trace, offset=ClockOffset(0.0, 0.0)) for trace in traces]
    arrivals: dict[Meeting, list[Arrival]] = {}
    for trace in traces:
        for flight in trace.flights:
            arrivals.setdefault(flight.call.meeting, []).append(Arrival.of(flight, trace))
    if (why := _why_unknown(traces, arrivals)) is not None:
        return why
    spans = [_spans_by_purpose(trace, arrivals) for trace in traces]
    purposes = sorted({purpose for trace in traces for purpose in trace.split.purpose_total_ms})
    return Waiting(
        {purpose: [length(mine.get(purpose, [])) for mine in spans] for purpose in purposes},
        {
            purpose: [
                length(intersect(mine.get(purpose, []), trace.split.exposed_spans_ms.get(purpose, [])))
                for mine, trace in zip(spans, traces, strict=True)
            ]
            for purpose in purposes
        },
    )


def clock_bound_us(traces: Sequence[RankTrace]) -> float | None:
    """The largest error of the ranks' clocks; None where all read the same, or where it is not known."""
    bounds = [trace.offset.bound_us for trace in traces if trace.offset is not None]
    if len({trace.clock for trace in traces}) == 1 or len(bounds) < len(traces):
        return None
    return max(bounds)


def _why_unknown(traces: Sequence[RankTrace], arrivals: Mapping[Meeting, list[Arrival]]) -> str | None:
    """Why waiting cannot be known: no part of it is then given out for the whole."""
    if any(trace.offset is None for trace in traces):
        return "the ranks' clocks cannot be compared: they run on several hosts"
    for rank, trace in enumerate(traces):
        if trace.unmatched is not None:
            return f"rank {rank}: {trace.unmatched}"
    for (kind, _, members, ordinal), came in arrivals.items():
        if len(came) != len(set(members)):
            ranks = ", ".join(map(str, sorted(set(members))))
            return f"{kind} {ordinal} of ranks {ranks} was found on {len(came)} of them"
    return None


def _spans_by_purpose(trace: RankTrace, arrivals: Mapping[Meeting, list[Arrival]]) -> dict[str, list[Span]]:
    """When this rank was there and the last one was not, in ms from the step's start."""
    spans: dict[str, list[Span]] = {}
    for flight in trace.flights:
        late_us = Arrival.of(flight, trace).us_until(max(arrivals[flight.call.meeting]))
        until = min(flight.arrival + late_us, flight.end)
        since_ms, until_ms = ((time - trace.start_us) / 1e3 for time in (flight.arrival, until))
        spans.setdefault(flight.call.purpose, []).append((since_ms, until_ms))
    return spans
