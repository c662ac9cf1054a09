"""Timeline of one rank's traced step: spans of compute by part, and of communication by call. No torch.

All times are microseconds of the host's monotonic clock. torch.profiler records when a rank calls a `c10d::`
operator, but not for which purpose and with which ranks. The tap recorded these facts in an inspected step:
the k-th call of a kind in the trace is matched with the k-th call of that kind in the tap.
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
"""Name of the annotations in which a rank reads its monotonic clock, so that trace times can be converted."""

COMPUTE_PARTS = ("attention", "packing", "optimizer", "other")
COPY_PARTS = ("packing", "optimizer", "other")
"""Parts of device copies and fills; in attention these are packing, because they calculate nothing."""

MOVEMENT_OPERATORS = frozenset(
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
"""Operators that reorder, copy or convert tensors and calculate nothing; in attention they count as
packing."""


@dataclass(frozen=True, slots=True)
class StepRegions:
    """Spans of a step, and of attention and the optimizer in it, in nanoseconds of the monotonic clock."""

    step_ns: tuple[int, int]
    clock_marks_ns: Sequence[int]
    """Clock readings inside the trace's CLOCK_MARK annotations, in order."""
    attention_ns: Sequence[tuple[int, int]]
    """Spans in which the rank was inside attention, forward or backward."""
    optimizer_ns: Sequence[tuple[int, int]]
    """Spans in which the rank ran the optimizer."""

    @property
    def step_us(self) -> tuple[float, float]:
        """Start and end of the step in microseconds."""
        return self.step_ns[0] / 1e3, self.step_ns[1] / 1e3

    def contains(self, time_us: float) -> bool:
        """Return whether the time lies in the step."""
        start, end = self.step_us
        return start <= time_us <= end


@dataclass(frozen=True, slots=True)
class CommunicationSpan:
    """One communication call of this rank while it is in flight.

    A call that could not be matched with the tap has a kind, a purpose and a number only
    (`placeholder_call`).
    """

    call: CollectiveCall
    arrival: float
    """Time at which this rank called."""
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Compute, communication and copies of one traced step."""

    step: tuple[float, float]
    compute: Mapping[str, Spans]
    """Compute spans of each part of COMPUTE_PARTS."""
    communications: Sequence[CommunicationSpan]
    copies: Mapping[str, Spans] = field(default_factory=dict)
    """Spans of GPU copies and fills without a kernel, by part of COPY_PARTS; empty on a CPU."""
    unmatched: str | None = None
    """Reason why the communications cannot be compared with those of other ranks; None if they can."""
    purposes_unknown: str | None = None
    """Reason why the purposes of the communications are unknown; None if they are known."""


class MatchError(ValueError):
    """Failure to match the profiler's calls with the tap's calls."""


def placeholder_call(kind: str, purpose: str, number: int) -> CollectiveCall:
    """Return a call without group, members and bytes, for communication that matches no call of the tap."""
    return CollectiveCall(kind, purpose, group="", members=(), ordinal=number, sent_bytes=0, arrival_ns=0)


def on_host_clock(tracks: Mapping[str, Track], marks_ns: Sequence[int]) -> dict[str, Track]:
    """Return the tracks with their times converted to the host's monotonic clock.

    The conversion uses the shortest CLOCK_MARK annotation. Its error is at most half the length of that
    annotation, a few microseconds.

    Args:
        tracks: Tracks in times of the trace's own clock.
        marks_ns: Clock readings of the rank, one inside each CLOCK_MARK annotation, in order.

    Raises:
        TraceError: The trace has more or fewer annotations than there are readings, or none.
    """
    annotations = tracks["annotations"]
    spans = annotations.spans[annotations.name_mask(CLOCK_MARK.__eq__)]
    spans = spans[np.argsort(spans[:, 0])]
    if not len(spans) or len(spans) != len(marks_ns):
        raise TraceError(
            f"the trace has {len(spans)} annotations {CLOCK_MARK}, but the rank made {len(marks_ns)}"
        )
    shortest = int(np.argmin(spans[:, 1] - spans[:, 0]))
    shift = marks_ns[shortest] / 1e3 - float(spans[shortest].mean())
    return {name: replace(track, spans=track.spans + shift) for name, track in tracks.items()}


def spans_by_part(
    spans: Spans, called_us: NDArray[np.float64], is_movement: NDArray[np.bool_], regions: StepRegions
) -> dict[str, Spans]:
    """Return the spans of each part of COMPUTE_PARTS, merged where they overlap.

    Args:
        spans: Compute spans, [n, 2].
        called_us: Time at which the work of each span was called or launched, [n]; it decides the part.
        is_movement: Mask of the spans that only move data, [n].
        regions: Spans of attention and of the optimizer.
    """
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
class IssuedCall:
    """Host thread and span of the operator that made one communication call, as the profiler recorded it."""

    thread: int
    start: float
    end: float


def issued_calls(operators: Track, regions: StepRegions) -> dict[str, list[IssuedCall]]:
    """Return this rank's communication calls in the step by kind, in order of their start.

    A dispatch mode makes one call appear as several nested operators; only the outermost counts.
    """
    is_call = operators.name_mask(lambda name: name.startswith("c10d::") and name in COLLECTIVES)
    rows = operators.outermost(np.flatnonzero(is_call))
    issued: dict[str, list[IssuedCall]] = {}
    for row in rows[np.argsort(operators.spans[rows, 0])]:
        start, end = operators.spans[row].tolist()
        if regions.contains(start):
            kind = COLLECTIVES[operators.names[operators.name_index[row]]].kind
            issued.setdefault(kind, []).append(IssuedCall(int(operators.thread[row]), start, end))
    return issued


def pair_calls(
    issued: Mapping[str, Sequence[IssuedCall]], calls: Sequence[CollectiveCall]
) -> list[tuple[IssuedCall, CollectiveCall]]:
    """Pair the k-th call of each kind that the profiler recorded with the k-th one of the tap.

    Raises:
        MatchError: The profiler and the tap have different numbers of calls of a kind.
    """
    tapped: dict[str, list[CollectiveCall]] = {}
    for call in calls:
        tapped.setdefault(call.kind, []).append(call)
    tap_counts, profiler_counts = (
        {kind: len(of_kind) for kind, of_kind in by_kind.items()} for by_kind in (tapped, issued)
    )
    if tap_counts != profiler_counts:
        raise MatchError(f"the tap recorded the calls {tap_counts}, the profiler {profiler_counts}")
    return [pair for kind, of_kind in issued.items() for pair in zip(of_kind, tapped[kind], strict=True)]
