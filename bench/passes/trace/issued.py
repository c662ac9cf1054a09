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
from bench.passes.trace.timeline import JoinError, Regions


@dataclass(frozen=True, slots=True)
class Issued:
    """One call as the profiler saw it on the host: its thread, and when it began and returned."""

    thread: int
    start: float
    end: float


def issued_calls(operators: Track, regions: Regions) -> dict[str, list[Issued]]:
    """Per kind this rank's calls of the step, in order; a dispatch mode makes one look like several."""
    rows = np.flatnonzero(operators.named(lambda n: n.startswith("c10d::") and n in COLLECTIVES))
    rows = operators.outermost(rows)
    issued: dict[str, list[Issued]] = {}
    for row in rows[np.argsort(operators.spans[rows, 0])]:
        start, end = operators.spans[row].tolist()
        if regions.hold(start):
            kind = COLLECTIVES[operators.names[operators.name[row]]].kind
            issued.setdefault(kind, []).append(Issued(int(operators.thread[row]), start, end))
    return issued


def paired(issued: Mapping[str, Sequence[Issued]], calls: Sequence[Call]) -> list[tuple[Issued, Call]]:
    """Of every kind the k-th call that the profiler saw with the tap's k-th.

    Raises JoinError unless they are as many.
    """
    tapped: dict[str, list[Call]] = {}
    for call in calls:
        tapped.setdefault(call.kind, []).append(call)
    counts, seen = ({kind: len(each) for kind, each in found.items()} for found in (tapped, issued))
    if counts != seen:
        raise JoinError(f"the tap saw {counts}, the profiler {seen}")
    return [pair for kind, found in issued.items() for pair in zip(found, tapped[kind], strict=True)]


def other_calls(issued: Mapping[str, Sequence[Issued]], calls: Sequence[Call]) -> str | None:
    """The first kind of call of which a traced step made more or fewer than the inspected one's `calls`.

    As in `it made 0 calls of all_to_all, the inspected step 8 (attention)`; None where there is none.
    """
    for kind in dict.fromkeys([*(call.kind for call in calls), *issued]):
        made, purposes = len(issued.get(kind, ())), [call.purpose for call in calls if call.kind == kind]
        if made != len(purposes):
            why = f" ({', '.join(dict.fromkeys(purposes))})" if purposes else ""
            return f"it made {made} calls of {kind}, the inspected step {len(purposes)}{why}"
    return None
