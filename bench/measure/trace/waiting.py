"""Waiting of ranks for one another, from the arrivals in all ranks' traced steps. No torch.

The traces are compared after the step, so measuring waiting adds no communication to it. Ranks of one host
share a monotonic clock. The clocks of several hosts are compared before and after the step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from bench.measure.calls import RendezvousKey
from bench.measure.trace.intervals import Span, intersect, length
from bench.measure.trace.split import StepSplit
from bench.measure.trace.timeline import CommunicationSpan


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Difference of a rank's monotonic clock to the clock of rank 0, in microseconds."""

    offset_us: float
    bound_us: float
    """Largest error of `offset_us`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One rank's traced step, as the rank reports it to the launcher."""

    split: StepSplit
    start_us: float
    """Start of the step, in microseconds of the host's monotonic clock like all times of `communications`."""
    communications: list[CommunicationSpan]
    clock: str
    """Identity of the monotonic clock; ranks with equal values read the same clock."""
    purposes_unknown: str | None
    """Reason why the purposes of the calls are unknown; None if they are known."""
    unmatched: str | None
    """Reason why the calls cannot be compared with those of other ranks; None if they can."""
    torch_attention: list[str] = field(default_factory=list)
    """Names of the operators of torch's `scaled_dot_product_attention` that ran."""
    offset: ClockOffset | None = None
    """Difference to the clock of rank 0; None if the clocks were not compared."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """Milliseconds that ranks waited, as lists by rank for each purpose."""

    waiting_ms: dict[str, list[float]]
    """Time from a rank's arrival until the last rank of the collective arrived."""
    exposed_ms: dict[str, list[float]]
    """The part of `waiting_ms` in which the rank computed nothing."""


@dataclass(frozen=True, slots=True, order=True)
class Arrival:
    """Time at which a rank called a collective, by the clock of rank 0."""

    us: float
    clock: str
    bound_us: float
    """Largest error of the clock's comparison with rank 0."""

    @classmethod
    def of_call(cls, communication: CommunicationSpan, trace: RankTrace) -> Arrival:
        """Return this rank's arrival at a communication, or its local time if clocks were not compared."""
        offset = trace.offset or ClockOffset(0.0, 0.0)
        return cls(communication.arrival - offset.offset_us, trace.clock, offset.bound_us)

    def us_until(self, last: Arrival) -> float:
        """Return the microseconds until the last rank's arrival; 0 if they are within the clocks' error."""
        late_us = last.us - self.us
        error_us = 0.0 if last.clock == self.clock else last.bound_us + self.bound_us
        return late_us if late_us > error_us else 0.0


def compute_waiting(traces: Sequence[RankTrace]) -> Waiting | str:
    """Return the waiting of every rank, or the reason why it is unknown.

    Between ranks on different hosts, lateness below the error of the clocks' comparison counts as 0.

    Args:
        traces: Traces of the same step by rank.
    """
    if len({trace.clock for trace in traces}) == 1:
        traces = [replace(trace, offset=ClockOffset(0.0, 0.0)) for trace in traces]
    arrivals: dict[RendezvousKey, list[Arrival]] = {}
    for trace in traces:
        for communication in trace.communications:
            arrivals.setdefault(communication.call.rendezvous_key, []).append(
                Arrival.of_call(communication, trace)
            )
    if (reason := _unknown_reason(traces, arrivals)) is not None:
        return reason
    by_rank = [_waiting_spans(trace, arrivals) for trace in traces]
    purposes = sorted({purpose for trace in traces for purpose in trace.split.purpose_total_ms})
    return Waiting(
        waiting_ms={purpose: [length(spans.get(purpose, [])) for spans in by_rank] for purpose in purposes},
        exposed_ms={
            purpose: [
                length(intersect(spans.get(purpose, []), trace.split.exposed_spans_ms.get(purpose, [])))
                for spans, trace in zip(by_rank, traces, strict=True)
            ]
            for purpose in purposes
        },
    )


def clock_bound_us(traces: Sequence[RankTrace]) -> float | None:
    """Return the largest error of the clocks' comparison in microseconds.

    None if all ranks read one clock, or if the clocks were not compared.
    """
    bounds = [trace.offset.bound_us for trace in traces if trace.offset is not None]
    if len({trace.clock for trace in traces}) == 1 or len(bounds) < len(traces):
        return None
    return max(bounds)


def _unknown_reason(
    traces: Sequence[RankTrace], arrivals: Mapping[RendezvousKey, list[Arrival]]
) -> str | None:
    """Return the reason why waiting is unknown; None if it is known.

    One unmatched call makes all waiting unknown, because a sum over the other calls would be too small.
    """
    if any(trace.offset is None for trace in traces):
        return "the ranks run on several hosts, whose clocks were not compared"
    for rank, trace in enumerate(traces):
        if trace.unmatched is not None:
            return f"rank {rank}: {trace.unmatched}"
    for (kind, _, members, ordinal), arrived in arrivals.items():
        if len(arrived) != len(set(members)):
            ranks = ", ".join(map(str, sorted(set(members))))
            return (
                f"{kind} number {ordinal} of ranks {ranks} is in the traces of {len(arrived)} of these ranks"
            )
    return None


def _waiting_spans(
    trace: RankTrace, arrivals: Mapping[RendezvousKey, list[Arrival]]
) -> dict[str, list[Span]]:
    """Return the spans from this rank's arrival to the last rank's, by purpose, in ms from the step's start.

    A span ends at the latest when its communication ends.
    """
    spans: dict[str, list[Span]] = {}
    for communication in trace.communications:
        late_us = Arrival.of_call(communication, trace).us_until(
            max(arrivals[communication.call.rendezvous_key])
        )
        until = min(communication.arrival + late_us, communication.end)
        since_ms, until_ms = ((time - trace.start_us) / 1e3 for time in (communication.arrival, until))
        spans.setdefault(communication.call.purpose, []).append((since_ms, until_ms))
    return spans
