"""The timeline of a rank on a GPU: its kernels and copies, and NCCL's kernels joined to the tap's calls.

A call launches its kernel before it returns. In a batch of sends and receives no call launches anything: one
kernel for all of them follows when the batch ends, and the profiler gives it neither ranks nor a size. So the
host's order says which calls a kernel serves, and the tap what these are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from bench.measure.calls import PURPOSE_OF_KIND, CollectiveCall
from bench.measure.trace.intervals import Spans, covers, spans_of, union
from bench.measure.trace.reader import TraceError, Track
from bench.measure.trace.timeline import (
    COPY_PARTS,
    MOVEMENTS,
    Flight,
    Issued,
    JoinError,
    Regions,
    Timeline,
    by_part,
    paired,
    unknown_call,
)

NCCL_PREFIX = "nccl"
KINDS_BY_KERNEL: Mapping[str, str] = {
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": "send_recv",
}
"""By a part of the kernel's own name; an all-to-all is sends and receives to NCCL."""
NO_KERNELS = (
    "the profiler saw no kernel of the GPU; another tool may hold CUPTI (Nsight, DCGM's profiling), or the"
    " driver may permit it to root only (NVreg_RestrictProfilingToAdminUsers)"
)


def cuda_timeline(
    tracks: Mapping[str, Track],
    regions: Regions,
    issued: Mapping[str, Sequence[Issued]],
    calls: Sequence[CollectiveCall],
) -> Timeline:
    """The timeline of a rank on a GPU: kernels and copies, booked where they were launched from.

    `calls` are the tap's, of this step or of one that made the same calls. Where NCCL's kernels cannot be
    joined to them the timeline says why, and a kernel is booked by its name and the place of its launch.
    Raises TraceError where the trace holds no kernel: no step without one is a step.
    """
    if not len(tracks["kernels"]):
        raise TraceError(NO_KERNELS)
    operators = tracks["operators"]
    kernels = _launched(tracks["kernels"], tracks["launches"])
    copies = _launched(tracks["copies"], tracks["launches"])
    is_nccl = tracks["kernels"].named(lambda name: name.startswith(NCCL_PREFIX))
    called = operators.outermost(np.flatnonzero(operators.named(lambda name: name.startswith("aten::"))))
    moves = union(operators.spans[called[operators.named(MOVEMENTS.__contains__)[called]]])
    is_movement = covers(moves, kernels.called) & (kernels.launch >= 0)
    copied = by_part(copies.spans, copies.called, np.ones(len(copies.spans), dtype=np.bool_), regions)
    # A barrier comes before the step, and its kernel is in the trace too.
    nccl = np.flatnonzero(is_nccl & (kernels.called >= regions.step_us[0]))
    try:
        flights, unmatched = _joined_flights(tracks["launches"], paired(issued, calls), nccl, kernels), None
    except JoinError as error:
        flights, unmatched = _unjoined_flights(tracks["kernels"], regions, nccl, kernels), str(error)
    return Timeline(
        step=regions.step_us,
        compute=by_part(kernels.spans[~is_nccl], kernels.called[~is_nccl], is_movement[~is_nccl], regions),
        flights=flights,
        copies={part: copied[part] for part in COPY_PARTS},
        unmatched=unmatched,
    )


@dataclass(frozen=True, slots=True)
class _Launched:
    """What ran on the device, by row."""

    spans: Spans
    launch: NDArray[np.int64]
    """Its launch's row, -1 where the trace does not hold it."""
    called: NDArray[np.float64]
    """When it was launched; without a launch when it began."""


def _launched(device: Track, launches: Track) -> _Launched:
    launch, called = np.full(len(device), -1, dtype=np.int64), device.spans[:, 0].copy()
    if len(launches):
        order = np.argsort(launches.correlation, kind="stable")
        known = launches.correlation[order]
        at = np.minimum(np.searchsorted(known, device.correlation), len(known) - 1)
        is_known = (known[at] == device.correlation) & (device.correlation >= 0)
        launch[is_known] = order[at[is_known]]
        called[is_known] = launches.spans[launch[is_known], 0]
    return _Launched(device.spans, launch, called)


def _joined_flights(
    launches: Track,
    pairs: Sequence[tuple[Issued, CollectiveCall]],
    nccl: NDArray[np.int64],
    kernels: _Launched,
) -> list[Flight]:
    """The tap's calls in flight, each from the start of its first kernel to the end of its last.

    A kernel starts when its rank arrives and spins until the others do, so its start is this rank's arrival.
    """
    if lost := int((kernels.launch[nccl] < 0).sum()):
        raise JoinError(f"the trace does not hold the launches of {lost} of {len(nccl)} NCCL kernels")
    launched = [
        Launch(int(row), int(launches.thread[kernels.launch[row]]), float(kernels.called[row]))
        for row in nccl
    ]
    flights = []
    for each in served(pairs, launched):
        spans = kernels.spans[each.rows]
        start, end = float(spans[:, 0].min()), float(spans[:, 1].max())
        flights.append(Flight(each.call, start, start, end))
    return flights


def _unjoined_flights(
    device: Track, regions: Regions, nccl: NDArray[np.int64], kernels: _Launched
) -> list[Flight]:
    """NCCL's kernels by their names and where they were launched, ranks and sizes unknown."""
    in_attention = covers(union(spans_of(regions.attention_ns) / 1e3), kernels.called)
    flights = []
    for number, row in enumerate(nccl[np.argsort(kernels.spans[nccl, 0])]):
        name = device.names[device.name[row]]
        kind = next((kind for part, kind in KINDS_BY_KERNEL.items() if part in name), "other")
        purpose = "attention" if in_attention[row] else PURPOSE_OF_KIND.get(kind, "other")
        start, end = kernels.spans[row].tolist()
        flights.append(Flight(unknown_call(kind, purpose, number), start, start, end))
    return flights


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of one NCCL kernel: the kernel's row, and when and on which thread of the host it was."""

    row: int
    thread: int
    time: float


@dataclass(frozen=True, slots=True)
class Served:
    """A call as the host issued it, and the rows of the kernels that carried it out."""

    issued: Issued
    call: CollectiveCall
    rows: list[int] = field(default_factory=list)

    @property
    def lacks_kernel(self) -> bool:
        """A call of a single rank may need none."""
        return not self.rows and len(self.call.members) > 1


def served(pairs: Iterable[tuple[Issued, CollectiveCall]], launches: Sequence[Launch]) -> list[Served]:
    """Every call of several ranks with its kernels; one of a single rank may need none.

    Raises JoinError where such a call has no kernel, and where a kernel has no call.
    """
    found = sorted((Served(*pair) for pair in pairs), key=lambda each: each.issued.start)
    for thread in {launch.thread for launch in launches}:
        _join(
            [each for each in found if each.issued.thread == thread],
            sorted((each for each in launches if each.thread == thread), key=lambda launch: launch.time),
        )
    idle = [each.call.kind for each in found if each.lacks_kernel]
    if idle:
        raise JoinError(f"{len(idle)} calls launched no NCCL kernel, the first of {idle[0]}")
    return [each for each in found if each.rows]


def _join(calls: Sequence[Served], launches: Iterable[Launch]) -> None:
    """Give the calls of one thread its kernels: one launched inside a call, or after a batch of calls."""
    starts = [each.issued.start for each in calls]
    batch: list[Served] = []
    closed = 0
    for launch in launches:
        made = bisect_right(starts, launch.time)
        if made and launch.time <= calls[made - 1].issued.end:
            calls[made - 1].rows.append(launch.row)
            continue
        if made > closed or not batch:
            batch = [each for each in calls[closed:made] if each.lacks_kernel]
        closed = made
        if not batch:
            raise JoinError("an NCCL kernel was launched by no call of the step")
        meetings = {each.call.meeting[:2] for each in batch}
        if len(meetings) > 1:
            raise JoinError(f"an NCCL kernel was launched for calls of {len(meetings)} kinds or groups")
        for each in batch:
            each.rows.append(launch.row)
