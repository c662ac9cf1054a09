"""The calls that a traced step issued, without a dispatch mode looking on, and whether an inspected one did.

A rank asks for communication by `c10d::` operators, on any device and from any library, and the profiler
writes down when. How much each call carried it does not say, so kinds and counts are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.passes.calls import COLLECTIVES, Call
from bench.passes.trace.reader import Track
from bench.passes.trace.timeline import JoinError, Regions, clock_shift_us, within


@dataclass(frozen=True, slots=True)
class Issued:
    """One call as the profiler saw it on the host: its thread, and when it began and returned."""

    thread: int
    start: float
    end: float


def issued_calls(operators: Track, regions: Regions, shift: float) -> dict[str, list[Issued]]:
    """Per kind this rank's calls of the step, in order; a dispatch mode makes one look like several."""
    rows = np.flatnonzero(operators.named(lambda n: n.startswith("c10d::") and n in COLLECTIVES))
    rows = operators.outermost(rows)
    issued: dict[str, list[Issued]] = {}
    for row in rows[np.argsort(operators.spans[rows, 0])]:
        start, end = (float(time) + shift for time in operators.spans[row])
        if within(start, regions):
            kind = COLLECTIVES[operators.names[operators.name[row]]].kind
            issued.setdefault(kind, []).append(Issued(int(operators.thread[row]), start, end))
    return issued


def paired(
    issued: Mapping[str, Sequence[Issued]], calls: Sequence[Call]
) -> dict[str, list[tuple[Issued, Call]]]:
    """Per kind the k-th call that the profiler saw with the tap's k-th; JoinError unless they are as many."""
    tapped: dict[str, list[Call]] = {}
    for call in calls:
        tapped.setdefault(call.kind, []).append(call)
    counts, seen = ({kind: len(each) for kind, each in found.items()} for found in (tapped, issued))
    if counts != seen:
        raise JoinError(f"the tap saw {counts}, the profiler {seen}")
    return {kind: [*zip(found, tapped[kind], strict=True)] for kind, found in issued.items()}


def other_calls(tracks: Mapping[str, Track], regions: Regions, calls: Sequence[Call]) -> str | None:
    """The first kind of call of which a traced step made more or fewer than the inspected one's `calls`.

    None where there is none, or where the trace cannot be read against this rank's clock.
    """
    try:
        shift, _ = clock_shift_us(tracks["annotations"], regions.clock_marks_ns)
    except JoinError:
        return None
    return first_difference(issued_calls(tracks["operators"], regions, shift), calls)


def first_difference(issued: Mapping[str, Sequence[Issued]], calls: Sequence[Call]) -> str | None:
    """`it made 0 calls of all_to_all, the inspected step 8 (attention)`, or None where they are as many."""
    purposes: dict[str, dict[str, None]] = {}
    for call in calls:
        purposes.setdefault(call.kind, {})[call.purpose] = None
    for kind in dict.fromkeys([*purposes, *issued]):
        made, inspected = len(issued.get(kind, ())), sum(call.kind == kind for call in calls)
        if made != inspected:
            why = f" ({', '.join(purposes[kind])})" if kind in purposes else ""
            return f"it made {made} calls of {kind}, the inspected step {inspected}{why}"
    return None
