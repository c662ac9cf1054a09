"""Timeline of a GPU rank, from the trace and from the calls that the tap recorded in the inspected step.

A collective launches its kernel before the call returns. In a batch of sends and receives the calls launch
nothing: one kernel for all of them is launched when the batch ends, and the profiler records neither its
ranks nor its size. The order of calls and launches on the host therefore decides which calls a kernel carries
out, and the tap supplies ranks, size and purpose of these calls.
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
    MOVEMENT_OPERATORS,
    CommunicationSpan,
    IssuedCall,
    MatchError,
    StepRegions,
    Timeline,
    pair_calls,
    placeholder_call,
    spans_by_part,
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
"""Kind of communication by a part of the NCCL kernel's name; NCCL runs an all-to-all as sends and
receives."""
NO_KERNELS = (
    "the profiler recorded no GPU kernel: another tool may hold CUPTI (Nsight, DCGM profiling), or the"
    " driver may permit profiling to root only (NVreg_RestrictProfilingToAdminUsers)"
)


def cuda_timeline(
    tracks: Mapping[str, Track],
    regions: StepRegions,
    issued: Mapping[str, Sequence[IssuedCall]],
    calls: Sequence[CollectiveCall],
) -> Timeline:
    """Return the timeline of a GPU rank.

    A kernel or copy counts for the part of the step (attention, optimizer, other) in which the host launched
    it. If the NCCL kernels do not match the calls, the kind of a kernel comes from its name and its purpose
    from the part in which it was launched, and the timeline states the reason.

    Args:
        tracks: Events of the trace on the host's monotonic clock.
        regions: Spans of the step, and of attention and the optimizer in it.
        issued: Calls of the step in the trace, by kind.
        calls: Calls that the tap recorded in the inspected step, which should make the same calls.

    Raises:
        TraceError: The trace has no kernel, although every step on a GPU launches some.
    """
    if not len(tracks["kernels"]):
        raise TraceError(NO_KERNELS)
    operators = tracks["operators"]
    kernels = device_events(tracks["kernels"], tracks["launches"])
    copies = device_events(tracks["copies"], tracks["launches"])
    is_nccl = tracks["kernels"].name_mask(lambda name: name.startswith(NCCL_PREFIX))
    outermost = operators.outermost(
        np.flatnonzero(operators.name_mask(lambda name: name.startswith("aten::")))
    )
    moves_data = operators.name_mask(MOVEMENT_OPERATORS.__contains__)
    movements = union(operators.spans[outermost[moves_data[outermost]]])
    is_movement = covers(movements, kernels.launched_us) & (kernels.launch_row >= 0)
    copy_parts = spans_by_part(
        copies.spans, copies.launched_us, np.ones(len(copies.spans), dtype=np.bool_), regions
    )
    # The kernel of the barrier before the step is in the trace too.
    nccl_rows = np.flatnonzero(is_nccl & (kernels.launched_us >= regions.step_us[0]))
    unmatched = None
    try:
        communications = _match_nccl(tracks["launches"], pair_calls(issued, calls), nccl_rows, kernels)
    except MatchError as error:
        communications = _unmatched_nccl(tracks["kernels"], regions, nccl_rows, kernels)
        unmatched = str(error)
    return Timeline(
        step=regions.step_us,
        compute=spans_by_part(
            kernels.spans[~is_nccl], kernels.launched_us[~is_nccl], is_movement[~is_nccl], regions
        ),
        communications=communications,
        copies={part: copy_parts[part] for part in COPY_PARTS},
        unmatched=unmatched,
    )


@dataclass(frozen=True, slots=True)
class DeviceEvents:
    """Kernels or copies of the device, one row each, with their launches by the host."""

    spans: Spans
    launch_row: NDArray[np.int64]
    """Row of the launch in the track of launches; -1 if the trace does not hold it."""
    launched_us: NDArray[np.float64]
    """Time of the launch; start of the event if the trace does not hold the launch."""


def device_events(device: Track, launches: Track) -> DeviceEvents:
    """Return the events of a device track, each with the launch that has the same correlation ID."""
    launch_row, launched = np.full(len(device), -1, dtype=np.int64), device.spans[:, 0].copy()
    if len(launches):
        order = np.argsort(launches.correlation, kind="stable")
        launch_ids = launches.correlation[order]
        position = np.minimum(np.searchsorted(launch_ids, device.correlation), len(launch_ids) - 1)
        has_launch = (launch_ids[position] == device.correlation) & (device.correlation >= 0)
        launch_row[has_launch] = order[position[has_launch]]
        launched[has_launch] = launches.spans[launch_row[has_launch], 0]
    return DeviceEvents(device.spans, launch_row, launched)


def _match_nccl(
    launches: Track,
    pairs: Sequence[tuple[IssuedCall, CollectiveCall]],
    nccl_rows: NDArray[np.int64],
    kernels: DeviceEvents,
) -> list[CommunicationSpan]:
    """Return the tap's calls, each in flight from the start of its first kernel to the end of its last.

    An NCCL kernel starts when its rank arrives and spins until the other ranks arrive, so its start is the
    arrival of this rank.
    """
    if lost := int((kernels.launch_row[nccl_rows] < 0).sum()):
        raise MatchError(f"the trace lacks the launches of {lost} of {len(nccl_rows)} NCCL kernels")
    nccl_launches = [
        KernelLaunch(int(row), int(launches.thread[kernels.launch_row[row]]), float(kernels.launched_us[row]))
        for row in nccl_rows
    ]
    communications = []
    for matched in match_kernels(pairs, nccl_launches):
        spans = kernels.spans[matched.kernel_rows]
        start, end = float(spans[:, 0].min()), float(spans[:, 1].max())
        communications.append(CommunicationSpan(matched.call, start, start, end))
    return communications


def _unmatched_nccl(
    device: Track, regions: StepRegions, nccl_rows: NDArray[np.int64], kernels: DeviceEvents
) -> list[CommunicationSpan]:
    """Return each NCCL kernel as one communication without ranks and size, its kind by the kernel's name.

    Its purpose is attention if it was launched there, and otherwise the usual purpose of its kind.
    """
    in_attention = covers(union(spans_of(regions.attention_ns) / 1e3), kernels.launched_us)
    communications = []
    for number, row in enumerate(nccl_rows[np.argsort(kernels.spans[nccl_rows, 0])]):
        name = device.names[device.name_index[row]]
        kind = next((kind for part, kind in KINDS_BY_KERNEL.items() if part in name), "other")
        purpose = "attention" if in_attention[row] else PURPOSE_OF_KIND.get(kind, "other")
        start, end = kernels.spans[row].tolist()
        communications.append(CommunicationSpan(placeholder_call(kind, purpose, number), start, start, end))
    return communications


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """Launch of one NCCL kernel: the kernel's row, the host thread and the time of the launch."""

    kernel_row: int
    thread: int
    time: float


@dataclass(frozen=True, slots=True)
class MatchedCall:
    """A communication call and the kernels that carried it out."""

    issued: IssuedCall
    call: CollectiveCall
    kernel_rows: list[int] = field(default_factory=list)

    @property
    def lacks_kernel(self) -> bool:
        """Whether the call has several ranks and no kernel yet; a call of one rank may need no kernel."""
        return not self.kernel_rows and len(self.call.members) > 1


def match_kernels(
    pairs: Iterable[tuple[IssuedCall, CollectiveCall]], launches: Sequence[KernelLaunch]
) -> list[MatchedCall]:
    """Return the calls that have kernels, in the order in which the host issued them.

    Raises:
        MatchError: A call of several ranks has no kernel, or a kernel has no call.
    """
    calls = sorted((MatchedCall(*pair) for pair in pairs), key=lambda call: call.issued.start)
    for thread in {launch.thread for launch in launches}:
        _assign_kernels(
            [call for call in calls if call.issued.thread == thread],
            sorted(
                (launch for launch in launches if launch.thread == thread), key=lambda launch: launch.time
            ),
        )
    idle = [call.call.kind for call in calls if call.lacks_kernel]
    if idle:
        raise MatchError(f"{len(idle)} calls launched no NCCL kernel, the first of kind {idle[0]}")
    return [call for call in calls if call.kernel_rows]


def _assign_kernels(calls: Sequence[MatchedCall], launches: Iterable[KernelLaunch]) -> None:
    """Add the kernels of one host thread to its calls.

    A kernel launched within a call belongs to that call. Any other kernel was launched at the end of a batch
    and belongs to all calls of the batch: those after the previous batch that have no kernel yet.
    """
    starts = [call.issued.start for call in calls]
    batch: list[MatchedCall] = []
    n_batched = 0
    for launch in launches:
        n_issued = bisect_right(starts, launch.time)
        if n_issued and launch.time <= calls[n_issued - 1].issued.end:
            calls[n_issued - 1].kernel_rows.append(launch.kernel_row)
            continue
        if n_issued > n_batched or not batch:
            batch = [call for call in calls[n_batched:n_issued] if call.lacks_kernel]
        n_batched = n_issued
        if not batch:
            raise MatchError("an NCCL kernel was launched by none of the step's calls")
        groups = {call.call.rendezvous_key[:2] for call in batch}
        if len(groups) > 1:
            raise MatchError(
                f"an NCCL kernel was launched after a batch of {len(groups)} kinds or groups of calls"
            )
        for call in batch:
            call.kernel_rows.append(launch.kernel_row)
