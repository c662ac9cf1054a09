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


def kernel(name, start, end, launched, correlation, thread=MAIN, cat="kernel", **args):
    """A device event and its launch, which took 10 us."""
    return [
        event("cudaLaunchKernel", launched, launched + 0.01, "cuda_runtime", thread, correlation=correlation),
        event(name, start, end, cat, STREAM, correlation=correlation, **args),
    ]


def nccl(
    operator, name, start, end, launched, correlation, collective, elements, ranks="[0, 1]", group="0",
    dtype="BFloat16", thread=MAIN,
):  # fmt: skip
    """A call of torch's that launches one kernel of NCCL, which carries the call's arguments."""
    notes = {
        "Collective name": collective, "In msg nelems": elements, "Out msg nelems": elements, "dtype": dtype,
        "Group size": 2, "Process Group Name": group, "Process Group Ranks": ranks,
    }  # fmt: skip
    return [
        event(operator, launched - 0.02, launched + 0.03, tid=thread),
        event("record_param_comms", launched - 0.01, launched + 0.02, tid=thread, **notes),
        *kernel(
            f"ncclDevKernel_{name}(ncclDevKernelArgsStorage<4096ul>)", start, end, launched, correlation,
            thread, **notes,
        ),
    ]  # fmt: skip


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
    return Call(kind, purpose, group, members, ordinal, 0, 0)
