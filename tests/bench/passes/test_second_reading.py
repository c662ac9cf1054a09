"""Two readings of one trace, written in different ways, find the same times.

The trace is synthetic: it is made here, in Kineto's format and with the oddities of public ones: starts out
of order, kernels that overlap on several streams, fractions of a microsecond on a clock of 10^15, launches
that the trace does not hold. TRACES names a folder of other traces of GPUs (*.json, *.json.gz), which are
then read twice as well.
"""

import gzip
import json
import os
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench.passes.trace.cuda_timeline import cuda_timeline
from bench.passes.trace.reader import read_events, read_tracks
from bench.passes.trace.split import split
from bench.passes.trace.timeline import Regions
from tests.bench.passes.second_reading import second_reading
from tests.bench.passes.traces import mark

OTHERS = sorted(Path(os.environ["TRACES"]).glob("*.json*")) if "TRACES" in os.environ else []
NAMES = {
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": "kernel",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "kernel",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128>>(Flash_fwd_params)": "kernel",
    "sm80_xmma_gemm_bf16bf16": "kernel",
    "Memcpy DtoD (Device -> Device)": "gpu_memcpy",
    "Memset (Device)": "gpu_memset",
}
START_US = 1_682_725_898_094_377
EVENTS, SECONDS_OF_TRACE = 600, 0.05
LOST = 0.05
TOLERANCE = {"rel": 1e-6, "abs": 1e-3}
"""In ms: times of 10^15 us are stored in quarters of one."""


@pytest.fixture
def made(tmp_path):
    """A trace whose times overlap in every way."""
    draw, events = random.Random(0), []
    for number in range(EVENTS):
        launch = START_US + draw.random() * SECONDS_OF_TRACE * 1e6
        name = draw.choice([*NAMES])
        args = {"External id": number, "correlation": number, "stream": draw.choice([7, 20, 24])}
        common = {"ph": "X", "pid": 0, "args": args}
        if draw.random() > LOST:
            events.append({**common, "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "tid": 4037,
                           "ts": launch, "dur": 5.25})  # fmt: skip
        events.append({**common, "cat": NAMES[name], "name": name, "tid": args["stream"],
                       "ts": launch + draw.expovariate(1 / 50), "dur": draw.expovariate(1 / 60)})  # fmt: skip
    draw.shuffle(events)
    path = tmp_path / "made.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"schemaVersion": 1, "traceEvents": events}).encode()))
    return path


def first_reading(path):
    """The same times as ours finds them, the whole file taken for one step."""
    tracks = read_tracks(read_events(path))
    spans = np.concatenate([track.spans for track in tracks.values()])
    start, end = float(spans[:, 0].min()), float(spans[:, 1].max())
    moved = {name: replace(track, spans=track.spans - start) for name, track in tracks.items()}
    moved["annotations"] = read_tracks([mark(0)])["annotations"]
    found = split(cuda_timeline(moved, Regions((0, round((end - start) * 1e3)), [0], (), ()), None))
    return {
        "busy": found.step_ms - found.idle_ms,
        "compute": sum(found.compute_ms.values()),
        "communication": found.total_ms,
        "exposed": found.exposed_ms,
        "copies": sum(found.copies_ms.values()),
    }


def test_a_sweep_over_all_times_finds_what_the_reader_finds(made):
    found = second_reading(made)
    assert min(found.values()) > 0
    assert first_reading(made) == {name: pytest.approx(ms, **TOLERANCE) for name, ms in found.items()}


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.name)
def test_a_sweep_over_all_times_finds_what_the_reader_finds_in_other_traces(path):
    found = second_reading(path)
    print(path.name, {name: round(ms, 3) for name, ms in found.items()})
    assert first_reading(path) == {name: pytest.approx(ms, **TOLERANCE) for name, ms in found.items()}
