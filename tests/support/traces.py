"""Events as torch's profiler writes them, and what a rank knew of the step they are of."""

from bench.measure.calls import CollectiveCall
from bench.measure.trace.reader import read_tracks
from bench.measure.trace.split import split
from bench.measure.trace.timeline import CLOCK_MARK, Regions, issued_calls, on_hosts_clock
from bench.measure.trace.waiting import RankTrace

MAIN, WORKER, STREAM = 100, 200, 7
SHIFT_US = 5_000_000
"""The monotonic clock is this far ahead of the trace's."""


def event(name, start, end, cat="cpu_op", tid=MAIN, **args):
    """A complete event; times in ms of the trace's clock."""
    return {
        "ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid,
        "ts": start * 1e3, "dur": (end - start) * 1e3, "args": args,
    }  # fmt: skip


def annotation(name, start, end, tid=WORKER):
    return event(name, start, end, "user_annotation", tid)


def mark(at):
    """The rank read its clock at this moment of the trace."""
    return annotation(CLOCK_MARK, at - 0.001, at + 0.001, MAIN)


def kernel(name, start, end, launched, correlation, thread=MAIN, cat="kernel", **args):
    """A device event and its launch, which took 10 us."""
    return [
        event("cudaLaunchKernel", launched, launched + 0.01, "cuda_runtime", thread, correlation=correlation),
        event(name, start, end, cat, STREAM, correlation=correlation, **args),
    ]


def nccl(operator, name, start, end, launched, correlation, thread=MAIN):
    """A call of torch's that launches one kernel of NCCL."""
    kernel_name = f"ncclDevKernel_{name}(ncclDevKernelArgsStorage<4096ul>)"
    return [
        event(operator, launched - 0.02, launched + 0.03, tid=thread),
        *kernel(kernel_name, start, end, launched, correlation, thread),
    ]


def hop(start, end, launched, correlation, thread=MAIN):
    """A batch of a send and a receive: one kernel follows both calls and carries no arguments of theirs."""
    return [
        event("c10d::send", launched - 0.04, launched - 0.03, tid=thread),
        event("c10d::recv_", launched - 0.02, launched - 0.01, tid=thread),
        *kernel(
            "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", start, end, launched, correlation,
            thread,
        ),
    ]  # fmt: skip


def regions(step, attention=(), optimizer=(), marks=(0,)):
    """The same moments, in ms of the trace's clock, as the rank noted them on its own."""
    return Regions(
        ns(step), [ns((at,))[0] for at in marks], [ns(each) for each in attention], [ns(e) for e in optimizer]
    )


def ns(moments):
    return tuple(round(SHIFT_US * 1e3 + moment * 1e6) for moment in moments)


def call(kind, purpose, members=(0, 1), ordinal=0, group="0"):
    return CollectiveCall(kind, purpose, group, members, ordinal, 0, 0)


def read(events, **known):
    """The tracks of events on the host's clock, and what the rank knew of the step."""
    known = regions(**known)
    return on_hosts_clock(read_tracks([mark(0), *events]), known.clock_marks_ns), known


def timeline_of(make, events, calls=(), **known):
    """What one of the two timelines makes of events and of the tap's calls."""
    tracks, known = read(events, **known)
    return make(tracks, known, issued_calls(tracks["operators"], known), calls)


def rank_trace(timeline):
    """A rank's traced step, on the one host."""
    return RankTrace(
        split=split(timeline), start_us=timeline.step[0], flights=[*timeline.flights], clock="one host",
        purposes_unknown=timeline.purposes_unknown, unmatched=timeline.unmatched, call_differences=None,
    )  # fmt: skip
