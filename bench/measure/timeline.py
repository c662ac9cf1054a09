"""One rank's traced step as spans of time: what computed, what communicated, for which purpose. No torch.

All times are microseconds of the host's monotonic clock. A `Timeline` says nothing yet about shares.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.measure.calls import COLLECTIVES, Call
from bench.measure.intervals import Spans, covers, spans_of, subtract, union
from bench.measure.nccl_kernels import nccl_flights
from bench.measure.trace_reader import Track

CLOCK_MARK = "bench::clock"
"""An annotation inside which a rank reads its monotonic clock: it ties the trace's clock to that one."""

COMPUTE_PARTS = ("attention", "packing", "optimizer", "other")

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

CALLS = ("c10d::", "_c10d_functional::", "deepspeed::dim_zero_all_to_all")
"""Operators that ask for communication or wait for it; DTensor's wait inside operators that calculate."""

GLOO_EVENTS: Mapping[str, str] = {
    "all_to_all": "gloo:all_to_all",
    "all_gather": "gloo:all_gather",
    "all_reduce": "gloo:all_reduce",
    "reduce_scatter": "gloo:all_reduce",  # gloo has none of its own
    "broadcast": "gloo:broadcast",
    "send": "gloo:send",
    "recv": "gloo:recv",
    "barrier": "gloo:barrier",
}
"""What gloo's worker threads call the transfer that a call of this kind asks for."""


@dataclass(frozen=True, slots=True)
class Regions:
    """What a rank knew of its own step: spans in ns of the monotonic clock."""

    step_ns: tuple[int, int]
    clock_marks_ns: Sequence[int]
    attention_ns: Sequence[tuple[int, int]]
    optimizer_ns: Sequence[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Flight:
    """One call in flight, from `start` to `end`; `arrival` is when this rank was ready for it.

    `members` is empty where the ranks that had to meet are not known.
    """

    kind: str
    purpose: str
    members: tuple[int, ...]
    ordinal: int
    arrival: float
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step: `compute` spans by part of COMPUTE_PARTS, and every call in flight."""

    step: tuple[float, float]
    compute: Mapping[str, Spans]
    flights: Sequence[Flight]


class JoinError(ValueError):
    """What the tap saw and what the profiler saw are not the same calls."""


def cpu_timeline(tracks: Mapping[str, Track], regions: Regions, calls: Sequence[Call] | None) -> Timeline:
    """The timeline of a rank on CPU cores and gloo.

    Compute is what `aten::` operators take on the thread that ran the step, less the waits in them: never
    autograd's nodes, nor gloo's own threads, whose copies are part of a transfer. `calls` are the tap's, of
    this step or of one that made the same calls; raises JoinError where it did not. Without calls all
    communication is for purpose `other`.
    """
    operators = tracks["operators"]
    shift, thread = clock_shift_us(tracks["annotations"], regions.clock_marks_ns)
    is_compute = operators.named(lambda name: name.startswith("aten::")) & (operators.thread == thread)
    rows = operators.outermost(np.flatnonzero(is_compute))
    is_movement = operators.named(MOVEMENTS.__contains__)[rows]
    spans = operators.spans[rows] + shift
    compute = _by_part(spans, spans[:, 0], is_movement, regions)
    calling = operators.spans[operators.named(lambda name: name.startswith(CALLS))] + shift
    return Timeline(
        step=_step_us(regions),
        compute={part: subtract(found, calling) for part, found in compute.items()},
        flights=(
            _unjoined_flights(tracks, regions, shift)
            if calls is None
            else gloo_flights(tracks, regions, calls, shift)
        ),
    )


def cuda_timeline(
    tracks: Mapping[str, Track],
    regions: Regions,
    calls: Sequence[Call] | None,  # noqa: ARG001
) -> Timeline:
    """The timeline of a rank on a GPU: kernels and copies, booked where they were launched from.

    NCCL's kernels name their ranks themselves, so the tap is not asked.
    """
    device, launches, operators = tracks["device"], tracks["launches"], tracks["operators"]
    shift, _ = clock_shift_us(tracks["annotations"], regions.clock_marks_ns)
    launched = _launch_rows(device, launches)
    known = launched >= 0
    launch_us = np.where(known, launches.spans[launched, 0], device.spans[:, 0])
    is_nccl = device.named(lambda name: name.startswith("nccl"))
    called = operators.outermost(np.flatnonzero(operators.named(lambda name: name.startswith("aten::"))))
    moves = called[operators.named(MOVEMENTS.__contains__)[called]]
    is_movement = covers(union(operators.spans[moves]), launch_us) & known
    attention = union(spans_of(regions.attention_ns) / 1e3)
    rows = np.flatnonzero(~is_nccl)
    return Timeline(
        step=_step_us(regions),
        compute=_by_part(device.spans[rows] + shift, launch_us[rows] + shift, is_movement[rows], regions),
        flights=[
            Flight(
                *flight.call, arrival=flight.start + shift, start=flight.start + shift, end=flight.end + shift
            )
            for flight in nccl_flights(device, covers(attention, launch_us + shift))
        ],
    )


def clock_shift_us(annotations: Track, marks_ns: Sequence[int]) -> tuple[float, int]:
    """What to add to the trace's times, and the thread that marked the clock.

    The shortest mark says it best: it is off by half of its length at the most, some microseconds.
    """
    rows = np.flatnonzero(annotations.named(CLOCK_MARK.__eq__))
    rows = rows[np.argsort(annotations.spans[rows, 0])]
    if not len(rows) or len(rows) != len(marks_ns):
        raise JoinError(f"the trace holds {len(rows)} marks of the clock, not {len(marks_ns)}")
    spans = annotations.spans[rows]
    best = int(np.argmin(spans[:, 1] - spans[:, 0]))
    return marks_ns[best] / 1e3 - float(spans[best].mean()), int(annotations.thread[rows[best]])


def gloo_flights(
    tracks: Mapping[str, Track], regions: Regions, calls: Sequence[Call], shift: float
) -> list[Flight]:
    """The tap's k-th call of a kind, the k-th `c10d::` event of it and the k-th of gloo's, joined.

    The `c10d::` event says when this rank arrived, gloo's how long the transfer took.
    """
    issued = _issued(tracks["operators"], regions, shift)
    tapped: dict[str, list[Call]] = {}
    for call in calls:
        tapped.setdefault(call.kind, []).append(call)
    counts = {kind: len(found) for kind, found in tapped.items()}
    if counts != {kind: len(found) for kind, found in issued.items()}:
        seen = {kind: len(found) for kind, found in issued.items()}
        raise JoinError(f"the tap saw {counts}, the profiler {seen}")
    asked = [
        (arrival, call)
        for kind, arrivals in issued.items()
        for arrival, call in zip(arrivals, tapped[kind], strict=True)
    ]
    transfers = _transfers(tracks["annotations"], regions, shift)
    flights = []
    for event, spans in transfers.items():
        mine = sorted((a for a in asked if GLOO_EVENTS[a[1].kind] == event), key=lambda pair: pair[0])
        if len(mine) != len(spans):
            raise JoinError(f"{len(mine)} calls, {len(spans)} transfers named {event}")
        flights += [
            Flight(call.kind, call.purpose, call.members, call.ordinal, arrival, float(start), float(end))
            for (arrival, call), (start, end) in zip(mine, spans, strict=True)
        ]
    return flights


def _unjoined_flights(tracks: Mapping[str, Track], regions: Regions, shift: float) -> list[Flight]:
    """Gloo's transfers by kind alone, of nobody knows which ranks."""
    kinds = {event: kind for kind, event in GLOO_EVENTS.items() if kind != "reduce_scatter"}
    return [
        Flight(kinds[event], "other", (), number, float(start), float(start), float(end))
        for event, spans in _transfers(tracks["annotations"], regions, shift).items()
        for number, (start, end) in enumerate(spans)
    ]


def _issued(operators: Track, regions: Regions, shift: float) -> dict[str, list[float]]:
    """Per kind when this rank asked for it, in order; a dispatch mode makes one call look like several."""
    rows = np.flatnonzero(operators.named(lambda n: n.startswith("c10d::") and n in COLLECTIVES))
    rows = operators.outermost(rows)
    issued: dict[str, list[float]] = {}
    for row in rows[np.argsort(operators.spans[rows, 0])]:
        arrival = float(operators.spans[row, 0]) + shift
        if _within(arrival, regions):
            kind = COLLECTIVES[operators.names[operators.name[row]]].kind
            issued.setdefault(kind, []).append(arrival)
    return issued


def _transfers(annotations: Track, regions: Regions, shift: float) -> dict[str, Spans]:
    """Gloo's events of the step by name, in order of their starts."""
    found = {}
    for event in dict.fromkeys(GLOO_EVENTS.values()):
        spans = annotations.spans[annotations.named(event.__eq__)] + shift
        spans = spans[np.argsort(spans[:, 0])]
        found[event] = spans[[_within(start, regions) for start in spans[:, 0]]] if len(spans) else spans
    return found


def _by_part(
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


def _launch_rows(device: Track, launches: Track) -> NDArray[np.int64]:
    """Per device event the row of its launch, -1 where the trace does not hold it."""
    order = np.argsort(launches.correlation, kind="stable")
    known = launches.correlation[order]
    at = np.searchsorted(known, device.correlation)
    at = np.minimum(at, len(known) - 1)
    if not len(known):
        return np.full(len(device), -1, dtype=np.int64)
    return np.where((known[at] == device.correlation) & (device.correlation >= 0), order[at], -1)


def _step_us(regions: Regions) -> tuple[float, float]:
    return regions.step_ns[0] / 1e3, regions.step_ns[1] / 1e3


def _within(time_us: float, regions: Regions) -> bool:
    start, end = _step_us(regions)
    return start <= time_us <= end
