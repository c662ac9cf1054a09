"""The traced pass: one step under torch.profiler, apart from timing because tracing slows a step."""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.measure.clock import synchronise
from bench.measure.intervals import Span, length, overlap

# `c10d::` events say what was asked for; on gloo the time is in `gloo:` events of worker threads.
GLOO_KINDS: Mapping[str, str] = {
    "gloo:all_to_all": "all_to_all",
    "gloo:all_gather": "all_gather",
    "gloo:all_reduce": "all_reduce",
    "gloo:reduce_scatter": "reduce_scatter",
    "gloo:broadcast": "broadcast",
    "gloo:send": "send_recv",
    "gloo:recv": "send_recv",
    "gloo:barrier": "barrier",
}
NCCL_KINDS: Mapping[str, str] = {
    "AllToAll": "all_to_all",
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "SendRecv": "send_recv",
}


Event = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TraceSource:
    """Which events of a device's trace are communication, of what kind, and which are compute."""

    communication: Callable[[Event], str | None]
    is_compute: Callable[[Event], bool]


@dataclass(frozen=True, slots=True)
class TracedStep:
    """One rank's traced step, times in milliseconds.

    `total_ms` is when any communication was in flight, `exposed_ms` the part of it without compute.
    """

    step_ms: float
    total_ms: float
    exposed_ms: float
    communication_ms: dict[str, float]
    calls: dict[str, int]


def trace_step(run_step: Callable[[], object], device: torch.device) -> TracedStep:
    """Run one step under the profiler and keep what its trace says; the trace itself is dropped."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    dist.barrier()
    with torch.profiler.profile(activities=activities) as profiler:
        start = time.perf_counter()
        run_step()
        synchronise(device)
        step_ms = (time.perf_counter() - start) * 1e3
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_bytes())["traceEvents"]
    return read_trace(events, step_ms, SOURCES[device.type])


def trace_steps(run_step: Callable[[int], object], steps: range, device: torch.device) -> TracedStep:
    """Trace several steps one by one and keep the one of median length, by its slowest rank.

    Every rank must call it; all keep the same step.
    """
    traced = [trace_step(partial(run_step, number), device) for number in steps]
    slowest_ms = torch.tensor([step.step_ms for step in traced], device=device)
    dist.all_reduce(slowest_ms, dist.ReduceOp.MAX)
    return traced[int(slowest_ms.argsort()[len(traced) // 2])]


def read_trace(events: Iterable[Event], step_ms: float, source: TraceSource) -> TracedStep:
    """Communication of one rank by kind from a Chrome trace's events: intervals merged, never summed."""
    spans: defaultdict[str, list[Span]] = defaultdict(list)
    compute: list[Span] = []
    for event in events:
        if event.get("ph") == "X":
            kind = source.communication(event)
            if kind is not None:
                spans[kind].append(_span(event))
            elif source.is_compute(event):
                compute.append(_span(event))
    communication = [span for found in spans.values() for span in found]
    total_us = length(communication)
    return TracedStep(
        step_ms=step_ms,
        total_ms=total_us / 1e3,
        exposed_ms=(total_us - overlap(communication, compute)) / 1e3,
        communication_ms={kind: length(found) / 1e3 for kind, found in spans.items()},
        calls={kind: len(found) for kind, found in spans.items()},
    )


def _span(event: Event) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _gloo_kind(event: Event) -> str | None:
    return GLOO_KINDS.get(event.get("name", ""))


def _is_cpu_compute(event: Event) -> bool:
    """`aten::` operators; never autograd's nodes, which contain waits."""
    return event.get("cat") == "cpu_op" and str(event.get("name", "")).startswith("aten::")


def _nccl_kind(event: Event) -> str | None:
    name = str(event.get("name", ""))
    if event.get("cat") != "kernel" or not name.startswith("ncclDevKernel_"):
        return None
    return next((kind for part, kind in NCCL_KINDS.items() if part in name), "other")


def _is_kernel(event: Event) -> bool:
    return event.get("cat") == "kernel"


SOURCES: Mapping[str, TraceSource] = {
    "cpu": TraceSource(_gloo_kind, _is_cpu_compute),
    "cuda": TraceSource(_nccl_kind, _is_kernel),
}
