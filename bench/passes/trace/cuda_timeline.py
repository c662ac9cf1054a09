"""The timeline of a rank on a GPU: its kernels and copies, and NCCL's kernels joined to the tap's calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.passes.calls import Call
from bench.passes.trace.intervals import Spans, covers, spans_of, union
from bench.passes.trace.issued import issued_calls, paired
from bench.passes.trace.launched import Launch, served
from bench.passes.trace.nccl_kernels import kind_and_purpose
from bench.passes.trace.reader import NCCL_PREFIX, TraceError, Track
from bench.passes.trace.timeline import (
    COPY_PARTS,
    MOVEMENTS,
    Flight,
    JoinError,
    Regions,
    Timeline,
    by_part,
    clock_shift_us,
    step_us,
)

NO_KERNELS = (
    "the profiler saw no kernel of the GPU; another tool may hold CUPTI (Nsight, DCGM's profiling), or the"
    " driver may permit it to root only (NVreg_RestrictProfilingToAdminUsers)"
)


def cuda_timeline(tracks: Mapping[str, Track], regions: Regions, calls: Sequence[Call] | None) -> Timeline:
    """The timeline of a rank on a GPU: kernels and copies, booked where they were launched from.

    `calls` are the tap's, of this step or of one that made the same calls. Where NCCL's kernels cannot be
    joined to them the timeline says why, and a kernel is booked by its name and the place of its launch.
    Raises TraceError where the trace holds no kernel: no step without one is a step.
    """
    if not len(tracks["kernels"]):
        raise TraceError(NO_KERNELS)
    operators, shift = tracks["operators"], clock_shift_us(tracks["annotations"], regions.clock_marks_ns)[0]
    kernels = _launched(tracks["kernels"], tracks["launches"], shift)
    copies = _launched(tracks["copies"], tracks["launches"], shift)
    is_nccl = tracks["kernels"].named(lambda name: name.startswith(NCCL_PREFIX))
    called = operators.outermost(np.flatnonzero(operators.named(lambda name: name.startswith("aten::"))))
    moves = union(operators.spans[called[operators.named(MOVEMENTS.__contains__)[called]]] + shift)
    is_movement = covers(moves, kernels.called) & (kernels.launch >= 0)
    copied = by_part(copies.spans, copies.called, np.ones(len(copies.spans), dtype=np.bool_), regions)
    # A barrier comes before the step, and its kernel is in the trace too.
    nccl = np.flatnonzero(is_nccl & (kernels.called >= step_us(regions)[0]))
    try:
        flights, unmatched = _joined_flights(tracks, regions, calls, nccl, kernels, shift), None
    except JoinError as error:
        flights, unmatched = _unjoined_flights(tracks["kernels"], regions, nccl, kernels), str(error)
    return Timeline(
        step=step_us(regions),
        compute=by_part(kernels.spans[~is_nccl], kernels.called[~is_nccl], is_movement[~is_nccl], regions),
        flights=flights,
        copies={part: copied[part] for part in COPY_PARTS},
        unmatched=unmatched,
    )


@dataclass(frozen=True, slots=True)
class _Launched:
    """What ran on the device, by row; times are those of the host's monotonic clock."""

    spans: Spans
    launch: NDArray[np.int64]
    """Its launch's row, -1 where the trace does not hold it."""
    called: NDArray[np.float64]
    """When it was launched; without a launch when it began."""


def _launched(device: Track, launches: Track, shift: float) -> _Launched:
    launch = _launch_rows(device, launches)
    begun = device.spans[:, 0]
    called = np.where(launch >= 0, launches.spans[launch, 0], begun) if len(launches) else begun
    return _Launched(device.spans + shift, launch, called + shift)


def _launch_rows(device: Track, launches: Track) -> NDArray[np.int64]:
    """Per device event the row of its launch, -1 where the trace does not hold it."""
    order = np.argsort(launches.correlation, kind="stable")
    known = launches.correlation[order]
    at = np.searchsorted(known, device.correlation)
    at = np.minimum(at, len(known) - 1)
    if not len(known):
        return np.full(len(device), -1, dtype=np.int64)
    return np.where((known[at] == device.correlation) & (device.correlation >= 0), order[at], -1)


def _joined_flights(
    tracks: Mapping[str, Track],
    regions: Regions,
    calls: Sequence[Call] | None,
    nccl: NDArray[np.int64],
    kernels: _Launched,
    shift: float,
) -> list[Flight]:
    """The tap's calls in flight, each from the start of its first kernel to the end of its last.

    A kernel starts when its rank arrives and spins until the others do, so its start is this rank's arrival.
    """
    if calls is None:
        raise JoinError("no step was tapped")
    if lost := int((kernels.launch[nccl] < 0).sum()):
        raise JoinError(f"the trace does not hold the launches of {lost} of {len(nccl)} NCCL kernels")
    thread = tracks["launches"].thread[kernels.launch]
    launches = [Launch(int(row), int(thread[row]), float(kernels.called[row])) for row in nccl]
    flights = []
    for each in served(paired(issued_calls(tracks["operators"], regions, shift), calls), launches):
        call, spans = each.call, kernels.spans[each.rows]
        start, end = float(spans[:, 0].min()), float(spans[:, 1].max())
        flights.append(
            Flight(call.kind, call.purpose, call.group, call.members, call.ordinal, start, start, end)
        )
    return flights


def _unjoined_flights(
    device: Track, regions: Regions, nccl: NDArray[np.int64], kernels: _Launched
) -> list[Flight]:
    """NCCL's kernels by what the profiler says of them and where they were launched, ranks unknown."""
    in_attention = covers(union(spans_of(regions.attention_ns) / 1e3), kernels.called)
    flights = []
    for number, row in enumerate(nccl[np.argsort(kernels.spans[nccl, 0])]):
        kind, purpose = kind_and_purpose(
            device.names[device.name[row]], device.notes[int(row)], in_attention=bool(in_attention[row])
        )
        start, end = (float(time) for time in kernels.spans[row])
        flights.append(Flight(kind, purpose, "", (), number, start, start, end))
    return flights
