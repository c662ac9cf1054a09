"""NCCL's kernels joined to the tap's calls, by where on the host each kernel was launched. No torch.

A call launches its kernel before it returns. In a batch of sends and receives no call launches anything: one
kernel for all of them follows when the batch ends, and the profiler gives it neither ranks nor a size. So the
host's order says which calls a kernel serves, and the tap what these are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from bench.passes.calls import Call
from bench.passes.trace.issued import Issued
from bench.passes.trace.timeline import JoinError


@dataclass(frozen=True, slots=True)
class Launch:
    """The launch of one NCCL kernel: the kernel's row, and when and on which thread of the host it was."""

    row: int
    thread: int
    time: float


@dataclass(frozen=True, slots=True)
class Served:
    """A call as the host issued it, and the rows of the kernels that carried it out."""

    issued: Issued
    call: Call
    rows: list[int] = field(default_factory=list)

    @property
    def lacks_kernel(self) -> bool:
        """A call of a single rank may need none."""
        return not self.rows and len(self.call.members) > 1


def served(pairs: Iterable[tuple[Issued, Call]], launches: Sequence[Launch]) -> list[Served]:
    """Every call of several ranks with its kernels; one of a single rank may need none.

    Raises JoinError where such a call has no kernel, and where a kernel has no call.
    """
    found = sorted((Served(*pair) for pair in pairs), key=lambda each: each.issued.start)
    for thread in {launch.thread for launch in launches}:
        _join(
            [each for each in found if each.issued.thread == thread],
            sorted((each for each in launches if each.thread == thread), key=lambda launch: launch.time),
        )
    idle = [each.call.kind for each in found if each.lacks_kernel]
    if idle:
        raise JoinError(f"{len(idle)} calls launched no NCCL kernel, the first of {idle[0]}")
    return [each for each in found if each.rows]


def _join(calls: Sequence[Served], launches: Iterable[Launch]) -> None:
    """Give the calls of one thread its kernels: one launched inside a call, or after a batch of calls."""
    starts = [each.issued.start for each in calls]
    batch: list[Served] = []
    closed = 0
    for launch in launches:
        made = bisect_right(starts, launch.time)
        if made and launch.time <= calls[made - 1].issued.end:
            calls[made - 1].rows.append(launch.row)
            continue
        if made > closed or not batch:
            batch = [each for each in calls[closed:made] if each.lacks_kernel]
        closed = made
        if not batch:
            raise JoinError("an NCCL kernel was launched by no call of the step")
        meetings = {each.call.meeting[:2] for each in batch}
        if len(meetings) > 1:
            raise JoinError(f"an NCCL kernel was launched for calls of {len(meetings)} kinds or groups")
        for each in batch:
            each.rows.append(launch.row)
