"""Split of one rank's traced step into compute, exposed communication, copies and idle time. No torch.

Every instant counts once, for the first part that claims it. Compute claims first, then communication, then
device copies; each of the three follows the order of COMPUTE_PARTS, PURPOSES or COPY_PARTS. An instant that
no part claims is idle, so the parts add up to the step. A copy does not hide communication, because it keeps
no compute unit busy.
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
class StepSplit:
    """Milliseconds of one rank's traced step.

    `compute_ms`, `exposed_spans_ms`, `copies_ms` and `idle_ms` do not overlap and add up to `step_ms`.
    """

    step_ms: float
    total_ms: float
    """Time in which any communication was in flight."""
    exposed_ms: float
    """The part of `total_ms` in which the rank computed nothing."""
    communication_ms: dict[str, float]
    """Time in flight by kind of communication."""
    calls: dict[str, int]
    """Number of calls by kind."""
    purpose_total_ms: dict[str, float]
    """Time in flight by purpose; two purposes in flight at the same time both count."""
    compute_ms: dict[str, float]
    """Time by part of COMPUTE_PARTS."""
    exposed_spans_ms: dict[str, list[tuple[float, float]]]
    """Exposed spans by purpose, from the start of the step."""
    copies_ms: dict[str, float]
    """Time by part of COPY_PARTS."""
    idle_ms: float


def split(timeline: Timeline) -> StepSplit:
    """Return the split of a timeline's step by the rules that the module states."""
    start, end = timeline.step
    whole = spans_of([timeline.step])
    kinds, purposes = defaultdict(list), defaultdict(list)
    for communication in timeline.communications:
        # A ring hop is one kind (send_recv), whether this rank sends or receives.
        kinds[communication.call.rendezvous_key[0]].append((communication.start, communication.end))
        purposes[communication.call.purpose].append((communication.start, communication.end))
    by_kind, by_purpose = (
        {name: intersect(spans, whole) for name, spans in named.items()} for named in (kinds, purposes)
    )
    compute, rest = _claim(timeline.compute, COMPUTE_PARTS, whole)
    exposed, rest = _claim(by_purpose, PURPOSES, rest)
    copies, rest = _claim(timeline.copies, COPY_PARTS, rest)
    return StepSplit(
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
        idle_ms=length(rest) / 1e3,
    )


def _claim(claims: Mapping[str, Spans], order: Sequence[str], free: Spans) -> tuple[dict[str, Spans], Spans]:
    """Return the part of `free` that each claim receives, in this order, and the unclaimed part of `free`."""
    received = {}
    for name in (name for name in order if name in claims):
        received[name] = intersect(claims[name], free)
        free = subtract(free, received[name])
    return received, free


def _lengths_ms(named: Mapping[str, Spans]) -> dict[str, float]:
    return {name: length(spans) / 1e3 for name, spans in named.items()}
