"""The timeline of a rank on a GPU: its kernels and copies, and what NCCL's kernels say of themselves.

Kineto adds to a kernel the arguments of the call that launched it: `Collective name`, `Process Group
Ranks`, `In msg nelems`, `Out msg nelems`, `dtype`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.passes.calls import SMALL_BYTES, Call, purpose_of
from bench.passes.trace.intervals import covers, spans_of, union
from bench.passes.trace.reader import Event, Track
from bench.passes.trace.timeline import MOVEMENTS, Flight, Regions, Timeline, by_part, clock_shift_us, step_us

KINDS_BY_COLLECTIVE: Mapping[str, str] = {
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "barrier": "barrier",
    # Parts of names above, so after them.
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}
"""By a part of `Collective name`, which torch writes in several ways."""
KINDS_BY_KERNEL: Mapping[str, str] = {
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": "send_recv",
}
"""By a part of the kernel's own name; an all-to-all is sends and receives to NCCL."""
DTYPE_BYTES: Mapping[str, int] = {
    "BFloat16": 2, "Half": 2, "Float": 4, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Bool": 1,
}  # fmt: skip


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
        step=step_us(regions),
        compute=by_part(device.spans[rows] + shift, launch_us[rows] + shift, is_movement[rows], regions),
        flights=[
            Flight(
                *flight.call, arrival=flight.start + shift, start=flight.start + shift, end=flight.end + shift
            )
            for flight in nccl_flights(device, covers(attention, launch_us + shift))
        ],
    )


def _launch_rows(device: Track, launches: Track) -> NDArray[np.int64]:
    """Per device event the row of its launch, -1 where the trace does not hold it."""
    order = np.argsort(launches.correlation, kind="stable")
    known = launches.correlation[order]
    at = np.searchsorted(known, device.correlation)
    at = np.minimum(at, len(known) - 1)
    if not len(known):
        return np.full(len(device), -1, dtype=np.int64)
    return np.where((known[at] == device.correlation) & (device.correlation >= 0), order[at], -1)


@dataclass(frozen=True, slots=True)
class KernelFlight:
    """One NCCL kernel: `call` is (kind, purpose, members, ordinal), times are the trace's."""

    call: tuple[str, str, tuple[int, ...], int]
    start: float
    end: float


def nccl_flights(device: Track, in_attention: NDArray[np.bool_]) -> Iterator[KernelFlight]:
    """The NCCL kernels of a track in order of their starts.

    `in_attention` says per row whether it was launched from inside attention. A kernel starts when its
    rank arrives and spins until the others do, so its start is this rank's arrival.
    """
    rows = np.array(sorted(device.notes, key=lambda row: device.spans[row, 0]), dtype=np.int64)
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for row in rows:
        notes = device.notes[int(row)]
        kind = kind_of(device.names[device.name[row]], notes)
        members = _ranks(notes)
        start, end = device.spans[row]
        purpose = purpose_of(kind, _handed_bytes(notes), in_attention=bool(in_attention[row]))
        yield KernelFlight((kind, purpose, members, counts[kind, members]), float(start), float(end))
        counts[kind, members] += 1


def kind_of(kernel: str, notes: Event) -> str:
    """The call's kind, by what the profiler calls it, else by the kernel's name."""
    collective = str(notes.get("Collective name", "")).lower()
    by_call = (kind for part, kind in KINDS_BY_COLLECTIVE.items() if part in collective)
    by_kernel = (kind for part, kind in KINDS_BY_KERNEL.items() if part in kernel)
    return next(by_call, None) or next(by_kernel, "other")


def _ranks(notes: Event) -> tuple[int, ...]:
    """Global ranks of the call's group; none where the profiler did not say, or cut a long list short."""
    try:
        return tuple(int(rank) for rank in json.loads(str(notes.get("Process Group Ranks", "[]"))))
    except ValueError:
        return ()


def _handed_bytes(notes: Event) -> int:
    """Bytes of the input; a call of unknown size is no small one."""
    if "In msg nelems" not in notes:
        return SMALL_BYTES
    return int(notes["In msg nelems"]) * DTYPE_BYTES.get(str(notes.get("dtype")), 1)
