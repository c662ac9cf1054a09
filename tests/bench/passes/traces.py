"""Events as torch's profiler writes them, and what a rank knew of the step they are of."""

from bench.passes.calls import Call
from bench.passes.trace.timeline import CLOCK_MARK, Regions

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


def kernel(name, start, end, launched, correlation, **args):
    """A device event and its launch, which took 10 us."""
    return [
        event("cudaLaunchKernel", launched, launched + 0.01, "cuda_runtime", correlation=correlation),
        event(name, start, end, "kernel", STREAM, correlation=correlation, **args),
    ]


def regions(step, attention=(), optimizer=(), marks=(0,)):
    """The same moments, in ms of the trace's clock, as the rank noted them on its own."""
    return Regions(
        ns(step), [ns((at,))[0] for at in marks], [ns(each) for each in attention], [ns(e) for e in optimizer]
    )


def ns(moments):
    return tuple(round(SHIFT_US * 1e3 + moment * 1e6) for moment in moments)


def call(kind, purpose, members=(0, 1), ordinal=0):
    return Call(kind, purpose, members, ordinal, 0, 0)
