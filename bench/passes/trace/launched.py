"""NCCL's kernels joined to the tap's calls, by where on the host each kernel was launched. No torch.

A call launches its kernel before it returns. In a batch of sends and receives no call launches anything: one
kernel for all of them follows when the batch ends, and the profiler gives it neither ranks nor a size. So the
host's order says which calls a kernel serves, and the tap what these are.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.passes.calls import Call, meeting
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
    """A call and the rows of the kernels that carried it out."""

    call: Call
    rows: list[int]


def served(pairs: Mapping[str, Sequence[tuple[Issued, Call]]], launches: Iterable[Launch]) -> list[Served]:
    """Every call of several ranks with its kernels; one of a single rank may need none.

    Raises JoinError where such a call has no kernel, and where a kernel has no call.
    """
    threads: dict[int, _Thread] = {}
    for issued, call in (pair for found in pairs.values() for pair in found):
        threads.setdefault(issued.thread, _Thread()).calls.append((issued, Served(call, [])))
    for launch in launches:
        threads.setdefault(launch.thread, _Thread()).launches.append(launch)
    found = [each for thread in threads.values() for each in thread.joined()]
    idle = [each.call.kind for each in found if not each.rows and len(each.call.members) > 1]
    if idle:
        raise JoinError(f"{len(idle)} calls launched no NCCL kernel, the first of {idle[0]}")
    return [each for each in found if each.rows]


@dataclass(slots=True)
class _Thread:
    """One thread of the host: its calls and its launches."""

    calls: list[tuple[Issued, Served]] = field(default_factory=list)
    launches: list[Launch] = field(default_factory=list)

    def joined(self) -> list[Served]:
        """The calls with their kernels: those launched inside a call, then those that follow a batch."""
        self.calls.sort(key=lambda pair: pair[0].start)
        starts = [issued.start for issued, _ in self.calls]
        following: list[tuple[int, int]] = []
        for launch in sorted(self.launches, key=lambda launch: launch.time):
            at = bisect_right(starts, launch.time) - 1
            if at >= 0 and launch.time <= self.calls[at][0].end:
                self.calls[at][1].rows.append(launch.row)
            else:
                following.append((at + 1, launch.row))
        self._close_batches(following)
        return [each for _, each in self.calls]

    def _close_batches(self, following: Sequence[tuple[int, int]]) -> None:
        """`following` are (how many calls were made before it, kernel) of launches between calls."""
        batch: list[Served] = []
        closed = 0
        for made, row in following:
            if made > closed or not batch:
                batch = [each for _, each in self.calls[closed:made] if _is_open(each)]
            closed = made
            if not batch:
                raise JoinError("an NCCL kernel was launched by no call of the step")
            meetings = {meeting(each.call.kind, each.call.group, (), 0) for each in batch}
            if len(meetings) > 1:
                raise JoinError(f"an NCCL kernel was launched for calls of {len(meetings)} kinds or groups")
            for each in batch:
                each.rows.append(row)


def _is_open(each: Served) -> bool:
    """Whether the call still lacks the kernel that it needs."""
    return not each.rows and len(each.call.members) > 1
