"""One step after another under torch.profiler, apart from timing because tracing slows a step.

Nothing is added to the step but marks: when attention and the optimizer were entered and left, and a few
readings of the clock beside it.
"""

from __future__ import annotations

import gzip
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from bench.attention.watch import AttentionWatch
from bench.measure.calls import CollectiveCall
from bench.measure.hooks import Spans
from bench.measure.timing.clock import synchronise
from bench.measure.trace.cpu_timeline import cpu_timeline
from bench.measure.trace.cuda_timeline import cuda_timeline
from bench.measure.trace.one_profiler import tracing
from bench.measure.trace.reader import KEPT_TRACE, Track, read_events, read_tracks
from bench.measure.trace.split import split
from bench.measure.trace.timeline import (
    CLOCK_MARK,
    Issued,
    Regions,
    Timeline,
    call_differences,
    issued_calls,
    on_hosts_clock,
)
from bench.measure.trace.waiting import RankTrace

CLOCK_MARKS = 5
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TIME_NAMESPACE = Path("/proc/self/ns/time")

TORCH_ATTENTION = re.compile(r"aten::_scaled_dot_product_\w+(?<!_backward)$")
"""What `scaled_dot_product_attention` calls in forward, one operator for each of its kernels."""

MakeTimeline = Callable[
    [Mapping[str, Track], Regions, Mapping[str, Sequence[Issued]], Sequence[CollectiveCall]], Timeline
]
TIMELINES: Mapping[str, MakeTimeline] = {"cpu": cpu_timeline, "cuda": cuda_timeline}


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One step as it was traced: the file, and what the rank itself knew of the step."""

    path: Path
    regions: Regions


@dataclass(slots=True)
class StepTracer:
    """Traces the steps that run in `step`, one by one; every rank must enter it.

    `attention` tells attention's borders, `optimizing` notes when the optimizer was at work. `looking` is on
    during the step and no longer: a tap must not see the barrier before it. `meet` is called before every
    collective. Steps run on after a profiler that failed, as the other ranks' do, and `failure` says why; no
    more steps of this rank are traced.

    The barrier is inside the profiler: rank by rank this takes more or less long to start, and the difference
    would pass for waiting in the step.
    """

    attention: AttentionWatch
    optimizing: Callable[[], AbstractContextManager[Spans]]
    looking: Callable[[], AbstractContextManager[object]]
    device: torch.device
    folder: Path
    meet: Callable[[], None] = lambda: None
    traced: list[StepTrace] = field(default_factory=list)
    failure: str | None = None

    def warm(self) -> None:
        """Pay for the profiler's first use, without a training step: a shorter one would make ZeRO-3 record
        its order of parameters anew, and the next step would hold calls that no other has.
        """
        with tracing(profile(activities=_activities(self.device))) as traced:
            torch.ones(1, device=self.device).add(1)
            synchronise(self.device)
        self.failure = traced.failure

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one step under the profiler, its Chrome trace written to the folder."""
        attention_before = len(self.attention.spans_ns)
        path = self.folder / f"trace-{dist.get_rank()}-{len(self.traced)}.json"
        with self._written(path):
            self.meet()
            dist.barrier()
            synchronise(self.device)
            marks_ns = [_mark_clock() for _ in range(CLOCK_MARKS)]
            with self.optimizing() as optimizer_ns, self.looking():
                start_ns = time.monotonic_ns()
                yield
                synchronise(self.device)
                end_ns = time.monotonic_ns()
        attention_ns = self.attention.spans_ns[attention_before:]
        regions = Regions((start_ns, end_ns), marks_ns, attention_ns, optimizer_ns)
        self.traced.append(StepTrace(path, regions))

    @contextmanager
    def _written(self, path: Path) -> Iterator[None]:
        """Under the profiler, whose Chrome trace is then in this file; without either once it has failed."""
        if self.failure is not None:
            yield
            return
        profiler = profile(activities=_activities(self.device))
        with tracing(profiler) as traced:
            yield
        self.failure = traced.failure
        if self.failure is None:
            try:
                profiler.export_chrome_trace(str(path))
            except (OSError, RuntimeError) as error:
                self.failure = f"the trace was not written: {error}"

    def read(self, calls: Sequence[CollectiveCall]) -> RankTrace | None:
        """What the last step's trace says; None, and `failure`, where it is not there or no good.

        `calls` are those of an inspected step.
        """
        if self.failure is not None:
            return None
        try:
            return read_step(self.traced[-1], calls, self.device.type)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.failure = f"the trace cannot be read: {error}"
            return None

    def median(self) -> int:
        """Which of the steps is of median length, by its slowest rank; of two in the middle the shorter.

        Every rank must call it; all are told the same.
        """
        steps_ns = [step.regions.step_ns for step in self.traced]
        slowest_ms = torch.tensor([(end - start) / 1e6 for start, end in steps_ns], device=self.device)
        self.meet()
        dist.all_reduce(slowest_ms, dist.ReduceOp.MAX)
        return int(slowest_ms.argsort()[(len(self.traced) - 1) // 2])


def read_step(traced: StepTrace, calls: Sequence[CollectiveCall], device_type: str) -> RankTrace:
    """What the traced step says of this rank; `calls` are those of an inspected step."""
    regions = traced.regions
    tracks = on_hosts_clock(read_tracks(read_events(traced.path)), regions.clock_marks_ns)
    issued = issued_calls(tracks["operators"], regions)
    timeline = TIMELINES[device_type](tracks, regions, issued, calls)
    return RankTrace(
        split=split(timeline),
        start_us=timeline.step[0],
        flights=[*timeline.flights],
        clock=_clock(),
        purposes_unknown=timeline.purposes_unknown,
        unmatched=timeline.unmatched,
        call_differences=call_differences(issued, calls),
        torch_attention=[name for name in sorted(tracks["operators"].names) if TORCH_ATTENTION.match(name)],
    )


def keep_trace(traced: Sequence[StepTrace], kept: int, folder: Path) -> None:
    """Leave one trace, gzipped, as KEPT_TRACE in the rank's folder, and no other; Perfetto opens it."""
    packed_path = folder / KEPT_TRACE.format(rank=dist.get_rank())
    with traced[kept].path.open("rb") as plain, gzip.open(packed_path, "wb", compresslevel=6) as packed:
        shutil.copyfileobj(plain, packed)
    for step in traced:
        step.path.unlink(missing_ok=True)


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """What the profiler looks at: a GPU's kernels and copies beside the operators."""
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [ProfilerActivity.CPU, *on_gpu]


def _clock() -> str:
    """What processes have in common that read the same monotonic clock: the boot, and any shift of it."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    shift = TIME_NAMESPACE.readlink().name if TIME_NAMESPACE.is_symlink() else ""
    return f"{boot} {shift}"


def _mark_clock() -> int:
    """The monotonic clock, read inside an annotation that the trace will hold."""
    with record_function(CLOCK_MARK):
        return time.monotonic_ns()
