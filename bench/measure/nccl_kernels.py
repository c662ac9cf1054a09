"""NCCL's kernels in a trace, and what torch's profiler says of each. No torch.

Kineto adds to a kernel the arguments of the call that launched it: `Collective name`, `Process Group
Ranks`, `In msg nelems`, `Out msg nelems`, `dtype`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.measure.calls import SMALL_BYTES, purpose_of
from bench.measure.trace_reader import Event, Track

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
}
"""By a part of `Collective name`, which torch writes in several ways."""
KINDS_BY_KERNEL: Mapping[str, str] = {
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "SendRecv": "send_recv",
}
"""By a part of the kernel's own name; an all-to-all is sends and receives to NCCL."""
DTYPE_BYTES: Mapping[str, int] = {
    "BFloat16": 2, "Half": 2, "Float": 4, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Bool": 1,
}  # fmt: skip


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
