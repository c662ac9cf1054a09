"""Synthetic events as torch.profiler writes them, and the regions that a rank records of the same step."""

from bench.measure.calls import CollectiveCall
from bench.measure.trace.reader import read_tracks
from bench.measure.trace.split import split
from bench.measure.trace.timeline import CLOCK_MARK, StepRegions, issued_calls, on_host_clock
from bench.measure.trace.waiting import RankTrace

MAIN, WORKER, STREAM = 100, 200, 7
SHIFT_US = 5_000_000
"""Microseconds by which the monotonic clock is ahead of the trace's clock."""


def event(name, start, end, cat="cpu_op", tid=MAIN, **args):
    """Return a complete event; times are ms of the trace's clock."""
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid,
        "ts": start * 1e3, "dur": (end - start) * 1e3, "args": args,
    }  # fmt: skip


def annotation(name, start, end, tid=WORKER):
    return event(name, start, end, "user_annotation", tid)


def mark(at):
    """Return the annotation in which the rank read its clock at time `at` of the trace."""
    return annotation(CLOCK_MARK, at - 0.001, at + 0.001, MAIN)


def kernel(name, start, end, launched, correlation, thread=MAIN, cat="kernel", **args):
    """Return a device event and its launch, which took 10 us."""
    return [
        event("cudaLaunchKernel", launched, launched + 0.01, "cuda_runtime", thread, correlation=correlation),
        event(name, start, end, cat, STREAM, correlation=correlation, **args),
    ]


def nccl(operator, name, start, end, launched, correlation, thread=MAIN):
    """Return a communication call that launches one NCCL kernel."""
    kernel_name = f"ncclDevKernel_{name}(ncclDevKernelArgsStorage<4096ul>)"
    return [
        event(operator, launched - 0.02, launched + 0.03, tid=thread),
        *kernel(kernel_name, start, end, launched, correlation, thread),
    ]


def hop(start, end, launched, correlation, thread=MAIN):
    """Return a batch of a send and a receive, whose one kernel follows both calls and has no arguments."""
    return [
        event("c10d::send", launched - 0.04, launched - 0.03, tid=thread),
        event("c10d::recv_", launched - 0.02, launched - 0.01, tid=thread),
        *kernel(
            "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", start, end, launched, correlation,
            thread,
        ),
    ]  # fmt: skip


def regions(step, attention=(), optimizer=(), marks=(0,)):
    """Return the rank's regions of a step; the arguments are ms of the trace's clock."""
    return StepRegions(
        to_ns(step),
        [to_ns((at,))[0] for at in marks],
        [to_ns(span) for span in attention],
        [to_ns(span) for span in optimizer],
    )


def to_ns(times):
    """Return times in ms of the trace's clock as ns of the monotonic clock."""
    return tuple(round(SHIFT_US * 1e3 + time * 1e6) for time in times)


def call(kind, purpose, members=(0, 1), ordinal=0, group="0"):
    return CollectiveCall(kind, purpose, group, members, ordinal, 0, 0)


def read(events, **moments):
    """Return the tracks of the events on the host's clock, and the regions of the step."""
    known = regions(**moments)
    return on_host_clock(read_tracks([mark(0), *events]), known.clock_marks_ns), known


def timeline_of(make, events, calls=(), **moments):
    """Return the timeline that `make` builds from events and the tap's calls."""
    tracks, known = read(events, **moments)
    return make(tracks, known, issued_calls(tracks["operators"], known), calls)


def rank_trace(timeline):
    """Return a rank's traced step; all ranks are on one host."""
    return RankTrace(
        split=split(timeline), start_us=timeline.step[0], communications=[*timeline.communications],
        clock="one host", purposes_unknown=timeline.purposes_unknown, unmatched=timeline.unmatched,
    )  # fmt: skip
