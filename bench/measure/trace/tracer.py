"""Tracing of steps under torch.profiler, apart from timing, because tracing slows a step.

The only instruments of a traced step are the profiler and hooks that record when attention and the optimizer
start and end. Before the step the rank reads its clock a few times.
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
from bench.measure.trace.exclusive_profiler import exclusive_profiling
from bench.measure.trace.reader import KEPT_TRACE_NAME, Track, read_events, read_tracks
from bench.measure.trace.split import split
from bench.measure.trace.timeline import (
    CLOCK_MARK,
    IssuedCall,
    StepRegions,
    Timeline,
    issued_calls,
    on_host_clock,
)
from bench.measure.trace.waiting import RankTrace

CLOCK_MARKS = 5
"""Number of clock readings before a traced step, of which the most precise is used."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TIME_NAMESPACE = Path("/proc/self/ns/time")

TORCH_ATTENTION = re.compile(r"aten::_scaled_dot_product_\w+(?<!_backward)$")
"""Forward operators of torch's `scaled_dot_product_attention`, one for each of its kernels."""

MakeTimeline = Callable[
    [Mapping[str, Track], StepRegions, Mapping[str, Sequence[IssuedCall]], Sequence[CollectiveCall]], Timeline
]
TIMELINES: Mapping[str, MakeTimeline] = {"cpu": cpu_timeline, "cuda": cuda_timeline}


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Trace file of one step, and the regions of the step that the rank recorded."""

    path: Path
    regions: StepRegions


@dataclass(slots=True)
class StepTracer:
    """Tracer of steps. Each runs within one context `step`, which every rank must enter.

    If the profiler fails, this rank runs its steps untraced, because the other ranks take part in them;
    `failure` states the reason.
    """

    attention: AttentionWatch
    """Recorder of the spans of attention."""
    optimizer_spans: Callable[[], AbstractContextManager[Spans]]
    """Context that yields the spans of the optimizer."""
    around_step: Callable[[], AbstractContextManager[object]]
    """Context entered after the barrier before the step, so that a tap in it does not record the barrier."""
    device: torch.device
    folder: Path
    """Folder of the trace files."""
    raise_if_rank_failed: Callable[[], None] = lambda: None
    """Function called before every collective of the tracer."""
    traced: list[StepTrace] = field(default_factory=list)
    """Steps that ran so far."""
    failure: str | None = None
    """Reason why tracing failed on this rank; None if it did not."""

    def warm_up(self) -> None:
        """Use the profiler once on a small operator, because its first use is slow.

        A short training step cannot replace the operator: after it ZeRO-3 would record its order of
        parameters anew, and the next step would make calls that no other step makes.
        """
        with exclusive_profiling(profile(activities=_activities(self.device))) as profiler:
            torch.ones(1, device=self.device).add(1)
            synchronise(self.device)
        self.failure = profiler.failure

    @contextmanager
    def step(self) -> Iterator[None]:
        """Run one step under the profiler, write its Chrome trace to the folder and append it to `traced`.

        The barrier before the step runs under the profiler too. The profiler takes longer to start on some
        ranks than on others, and without the barrier the difference would count as waiting in the step.
        """
        n_attention_spans = len(self.attention.spans_ns)
        path = self.folder / f"trace-{dist.get_rank()}-{len(self.traced)}.json"
        with self._profile_to(path):
            self.raise_if_rank_failed()
            dist.barrier()
            synchronise(self.device)
            marks_ns = [_mark_clock() for _ in range(CLOCK_MARKS)]
            with self.optimizer_spans() as optimizer_ns, self.around_step():
                start_ns = time.monotonic_ns()
                yield
                synchronise(self.device)
                end_ns = time.monotonic_ns()
        attention_ns = self.attention.spans_ns[n_attention_spans:]
        regions = StepRegions((start_ns, end_ns), marks_ns, attention_ns, optimizer_ns)
        self.traced.append(StepTrace(path, regions))

    @contextmanager
    def _profile_to(self, path: Path) -> Iterator[None]:
        """Run the profiler and write its trace to `path`; do neither if the profiler has failed before."""
        if self.failure is not None:
            yield
            return
        profiler = profile(activities=_activities(self.device))
        with exclusive_profiling(profiler) as running:
            yield
        self.failure = running.failure
        if self.failure is None:
            try:
                profiler.export_chrome_trace(str(path))
            except (OSError, RuntimeError) as error:
                self.failure = f"the trace could not be written: {error}"

    def read(self, calls: Sequence[CollectiveCall]) -> RankTrace | None:
        """Return the contents of the last step's trace; None if tracing or reading failed, see `failure`.

        Args:
            calls: Calls that the tap recorded in an inspected step.
        """
        if self.failure is not None:
            return None
        try:
            return read_step(self.traced[-1], calls, self.device.type)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.failure = f"the trace cannot be read: {error}"
            return None

    def median_step(self) -> int:
        """Return the index of the step of median length, the same on all ranks; every rank must call this.

        The length of a step is that of its slowest rank. Of two steps in the middle the shorter is taken.
        """
        steps_ns = [step.regions.step_ns for step in self.traced]
        slowest_ms = torch.tensor([(end - start) / 1e6 for start, end in steps_ns], device=self.device)
        self.raise_if_rank_failed()
        dist.all_reduce(slowest_ms, dist.ReduceOp.MAX)
        return int(slowest_ms.argsort()[(len(self.traced) - 1) // 2])


def read_step(traced: StepTrace, calls: Sequence[CollectiveCall], device_type: str) -> RankTrace:
    """Return the contents of a step's trace.

    Args:
        traced: Trace file and regions of the step.
        calls: Calls that the tap recorded in an inspected step.
        device_type: "cpu" or "cuda".
    """
    regions = traced.regions
    tracks = on_host_clock(read_tracks(read_events(traced.path)), regions.clock_marks_ns)
    issued = issued_calls(tracks["operators"], regions)
    timeline = TIMELINES[device_type](tracks, regions, issued, calls)
    return RankTrace(
        split=split(timeline),
        start_us=timeline.step[0],
        communications=[*timeline.communications],
        clock=_clock_id(),
        purposes_unknown=timeline.purposes_unknown,
        unmatched=timeline.unmatched,
        torch_attention=[name for name in sorted(tracks["operators"].names) if TORCH_ATTENTION.match(name)],
    )


def keep_trace(traced: Sequence[StepTrace], index: int, folder: Path) -> None:
    """Store the trace at `index` as a gzipped file KEPT_TRACE_NAME in the folder, and delete all trace files.

    Perfetto opens the gzipped file.
    """
    packed_path = folder / KEPT_TRACE_NAME.format(rank=dist.get_rank())
    with traced[index].path.open("rb") as plain, gzip.open(packed_path, "wb", compresslevel=6) as packed:
        shutil.copyfileobj(plain, packed)
    for step in traced:
        step.path.unlink(missing_ok=True)


def _activities(device: torch.device) -> list[ProfilerActivity]:
    """Return the profiler's activities: CPU operators, on a GPU also kernels and copies."""
    on_gpu = [ProfilerActivity.CUDA] if device.type == "cuda" else []
    return [ProfilerActivity.CPU, *on_gpu]


def _clock_id() -> str:
    """Return the boot ID and time namespace, which are equal for processes that read one monotonic clock."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    namespace = TIME_NAMESPACE.readlink().name if TIME_NAMESPACE.is_symlink() else ""
    return f"{boot} {namespace}"


def _mark_clock() -> int:
    """Return the monotonic clock in nanoseconds, read inside an annotation that the trace will contain."""
    with record_function(CLOCK_MARK):
        return time.monotonic_ns()
