"""One rank's traced step as spans of time: what computed, what communicated, for which purpose. No torch.

All times are microseconds of the host's monotonic clock. A `Timeline` says nothing yet about shares. A rank
asks for communication by `c10d::` operators, and the profiler writes down when; how much each call carried it
does not say, so kinds and counts are compared with those of an inspected step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from bench.measure.calls import COLLECTIVES, CollectiveCall
from bench.measure.trace.intervals import Spans, covers, spans_of, union
from bench.measure.trace.reader import TraceError, Track

CLOCK_MARK = "bench::clock"
"""An annotation inside which a rank reads its monotonic clock: it ties the trace's clock to that one."""

COMPUTE_PARTS = ("attention", "packing", "optimizer", "other")
COPY_PARTS = ("packing", "optimizer", "other")
"""A copy or fill in attention is packing: it calculates nothing."""

MOVEMENTS = frozenset(
    f"aten::{name}"
    for name in (
        "copy_", "clone", "contiguous", "cat", "stack", "concat", "to", "_to_copy", "reshape", "flatten",
        "repeat", "repeat_interleave", "index", "index_select", "gather", "index_copy_", "permute",
        "transpose", "view", "view_as", "unflatten", "unsqueeze", "squeeze", "expand", "expand_as",
        "select", "slice", "split", "split_with_sizes", "chunk", "narrow", "unbind", "as_strided", "alias",
        "detach", "detach_", "empty", "empty_like", "new_empty", "t", "empty_strided",
        "split_with_sizes_copy",
    )
)  # fmt: skip
"""Operators that arrange, copy or convert and calculate nothing: packing, where attention calls them."""


@dataclass(frozen=True, slots=True)
class Regions:
    """What a rank knew of its own step: spans in ns of the monotonic clock."""

    step_ns: tuple[int, int]
    clock_marks_ns: Sequence[int]
    attention_ns: Sequence[tuple[int, int]]
    optimizer_ns: Sequence[tuple[int, int]]

    @property
    def step_us(self) -> tuple[float, float]:
        """Start and end of the step."""
        return self.step_ns[0] / 1e3, self.step_ns[1] / 1e3

    def hold(self, time_us: float) -> bool:
        """Whether the time lies in the step."""
        start, end = self.step_us
        return start <= time_us <= end


@dataclass(frozen=True, slots=True)
class Flight:
    """One call in flight, from `start` to `end`; `arrival` is when this rank was ready for it.

    Where the call is not known it has a kind, a purpose and a number, and no group and members.
    """

    call: CollectiveCall
    arrival: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step: `compute` spans by part of COMPUTE_PARTS, and every call in flight."""

    step: tuple[float, float]
    compute: Mapping[str, Spans]
    flights: Sequence[Flight]
    copies: Mapping[str, Spans] = field(default_factory=dict)
    """By part of COPY_PARTS what a GPU copied or filled without a kernel; a CPU does nothing of the kind."""
    unmatched: str | None = None
    """Why the flights cannot be put beside those of other ranks; None where they can."""
    purposes_unknown: str | None = None
    """Why their purposes are not known either; None where they are."""


class JoinError(ValueError):
    """What the tap saw and what the profiler saw are not the same calls."""


def unknown_call(kind: str, purpose: str, number: int) -> CollectiveCall:
    """What stands for a call of which only this is known."""
    return CollectiveCall(kind, purpose, group="", members=(), ordinal=number, sent_bytes=0, arrival_ns=0)


def on_hosts_clock(tracks: Mapping[str, Track], marks_ns: Sequence[int]) -> dict[str, Track]:
    """The tracks in times of the host's monotonic clock, which the rank read in annotations of the trace.

    The shortest mark says it best: it is off by half of its length at the most, some microseconds.
    """
    annotations = tracks["annotations"]
    spans = annotations.spans[annotations.named(CLOCK_MARK.__eq__)]
    spans = spans[np.argsort(spans[:, 0])]
    if not len(spans) or len(spans) != len(marks_ns):
        raise TraceError(f"the trace holds {len(spans)} marks of the clock, not {len(marks_ns)}")
    best = int(np.argmin(spans[:, 1] - spans[:, 0]))
    shift = marks_ns[best] / 1e3 - float(spans[best].mean())
    return {name: replace(track, spans=track.spans + shift) for name, track in tracks.items()}


def by_part(
    spans: Spans, called_us: NDArray[np.float64], is_movement: NDArray[np.bool_], regions: Regions
) -> dict[str, Spans]:
    """Compute spans by part, from when each was called or launched."""
    in_attention = covers(union(spans_of(regions.attention_ns) / 1e3), called_us)
    in_optimizer = covers(union(spans_of(regions.optimizer_ns) / 1e3), called_us) & ~in_attention
    masks = {
        "attention": in_attention & ~is_movement,
        "packing": in_attention & is_movement,
        "optimizer": in_optimizer,
        "other": ~in_attention & ~in_optimizer,
    }
    return {part: union(spans[mask]) for part, mask in masks.items()}


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


def paired(
    issued: Mapping[str, Sequence[Issued]], calls: Sequence[CollectiveCall]
) -> list[tuple[Issued, CollectiveCall]]:
    """Of every kind the k-th call that the profiler saw with the tap's k-th.

    Raises JoinError unless they are as many.
    """
    tapped: dict[str, list[CollectiveCall]] = {}
    for call in calls:
        tapped.setdefault(call.kind, []).append(call)
    counts, seen = ({kind: len(each) for kind, each in found.items()} for found in (tapped, issued))
    if counts != seen:
        raise JoinError(f"the tap saw {counts}, the profiler {seen}")
    return [pair for kind, found in issued.items() for pair in zip(found, tapped[kind], strict=True)]


def call_differences(issued: Mapping[str, Sequence[Issued]], calls: Sequence[CollectiveCall]) -> str | None:
    """The first kind of call of which a traced step made more or fewer than the inspected one's `calls`.

    As in `it made 0 calls of all_to_all, the inspected step 8 (attention)`; None where there is none.
    """
    for kind in dict.fromkeys([*(call.kind for call in calls), *issued]):
        made, purposes = len(issued.get(kind, ())), [call.purpose for call in calls if call.kind == kind]
        if made != len(purposes):
            why = f" ({', '.join(dict.fromkeys(purposes))})" if purposes else ""
            return f"it made {made} calls of {kind}, the inspected step {len(purposes)}{why}"
    return None
