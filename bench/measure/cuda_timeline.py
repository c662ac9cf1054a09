"""The timeline of a rank on a GPU: its kernels and copies, and what NCCL's kernels say of themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.measure.calls import Call
from bench.measure.intervals import covers, spans_of, union
from bench.measure.nccl_kernels import nccl_flights
from bench.measure.timeline import (
    MOVEMENTS,
    Flight,
    Regions,
    Timeline,
    by_part,
    clock_shift_us,
    step_us,
)
from bench.measure.trace_reader import Track


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
