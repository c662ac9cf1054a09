"""What follows for a cell from how its ranks ended."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.ranks.log import JOIN, RefusedError, WrongResultError
from bench.ranks.out_of_memory import KINDS, memory_of_text
from bench.record.record import Failure, OutOfMemory, Status
from bench.run.node.ranks import LOST_PEER_TEXTS, RankEnd, RankFailure, lost_a_peer

NODE_LOST = "NODE_LOST"
"""The kind of failure of a node that is out of reach."""
BEFORE_THE_LIMIT = ("start", JOIN, "strategy", "limit")
"""Phases in which a memory limit does not count yet."""
UNCHECKED_ENDS = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


def classify(ends: Sequence[RankEnd], *, limited: bool = False) -> tuple[Status, Failure | None]:
    """The cell's status, and the failure of the rank that caused it; CAUSES says which of several counts.

    `limited`: the cell's ranks had a memory limit on a CPU, which explains more errors.
    """
    if all(end.report is not None for end in ends):
        return Status.OK, None
    ranks = Ranks(ends, limited)
    for status, is_cause in CAUSES:
        first = next((end for end in ends if is_cause(end, ranks)), None)
        if first is not None:
            return status, _failure(first, status, ranks)
    return Status.ERROR, _failure(ends[0], Status.ERROR, ranks)


@dataclass(frozen=True, slots=True)
class Ranks:
    """All ends of a cell, for the causes that depend on more than one."""

    ends: Sequence[RankEnd]
    limited: bool

    def memory(self, end: RankEnd) -> str | None:
        """`device` or `host` where this rank ran out of its memory, by its failure or else by its log."""
        failure = end.failure
        if failure is None:
            if end.report:
                return None
            return self._of_a_signal(end) or memory_of_text(end.log_tail, limited=self.limited)
        if failure.out_of_memory is not None:
            return failure.out_of_memory.memory
        return KINDS.get(failure.kind) or memory_of_text(failure.message, limited=self.limited)

    def _of_a_signal(self, end: RankEnd) -> str | None:
        """`host` where a limit held and the rank died as one does that uses memory which it was refused."""
        held = self.limited and end.place is not None and end.place.phase not in BEFORE_THE_LIMIT
        return "host" if held and end.exit_code in UNCHECKED_ENDS else None

    @property
    def reached_the_deadline(self) -> bool:
        """Whether ranks were stopped because of the deadline, not because another had failed."""
        return not any(end.exit_code is not None and end.report is None for end in self.ends)


def _was_killed(end: RankEnd, _: Ranks) -> bool:
    return end.exit_code in (-signal.SIGKILL, -signal.SIGTERM)


def _crashed(end: RankEnd, ranks: Ranks) -> bool:
    by_signal = end.exit_code is not None and end.exit_code < 0
    return by_signal and not _was_killed(end, ranks) and not _ended_by_watchdog(end)


def _ended_by_watchdog(end: RankEnd) -> bool:
    """NCCL's watchdog aborts a rank whose peer is gone, before the rank can write a failure."""
    aborted = end.failure is None and end.exit_code == -signal.SIGABRT
    return aborted and any(text in end.log_tail for text in LOST_PEER_TEXTS)


def _raised(end: RankEnd, kind: type[Exception]) -> bool:
    return end.failure is not None and end.failure.kind == kind.__name__


def _left_without_result(end: RankEnd, _: Ranks) -> bool:
    says_nothing = end.exit_code is not None and end.report is None and end.failure is None
    return says_nothing and not _ended_by_watchdog(end)


CAUSES: Sequence[tuple[Status, Callable[[RankEnd, Ranks], bool]]] = (
    (Status.UNSUPPORTED, lambda end, _: _raised(end, RefusedError)),
    (Status.WRONG_RESULT, lambda end, _: _raised(end, WrongResultError)),
    (Status.OUT_OF_MEMORY, lambda end, ranks: ranks.memory(end) is not None),
    (Status.KILLED, lambda end, _: end.node_lost is not None),
    (Status.KILLED, _was_killed),
    (Status.CRASHED, _crashed),
    (Status.ERROR, lambda end, _: end.failure is not None and not lost_a_peer(end.failure)),
    (Status.ERROR, _left_without_result),
    (Status.TIMED_OUT, lambda end, _: end.hang is not None),
    (Status.TIMED_OUT, lambda end, ranks: end.exit_code is None and ranks.reached_the_deadline),
    # After others had lost a peer, and so long before the deadline.
    (Status.ERROR, lambda end, _: end.exit_code is None and end.failure is None),
)


def _failure(end: RankEnd, status: Status, ranks: Ranks) -> Failure:
    # A rank that was ended for keeping others waiting may have lost the others first, whose end is no cause.
    hung = status is Status.TIMED_OUT and end.hang is not None
    written = None if hung else end.failure
    where = written or end.place
    return Failure(
        rank=end.rank,
        phase=None if where is None else where.phase,
        kind=_exit_kind(end, status) if written is None else written.kind,
        message=_message(end, written, status),
        log_tail=end.log_tail,
        step_phase=None if where is None else where.step_phase,
        detected_after_s=end.detected_after_s,
        out_of_memory=_out_of_memory(written, ranks.memory(end)),
        node=end.node,
    )


def _message(end: RankEnd, written: RankFailure | None, status: Status) -> str:
    if end.node_lost is not None:
        return f"its node is lost: {end.node_lost}"
    return (written and written.message) or end.hang or _exit_message(end, status)


def _out_of_memory(written: RankFailure | None, memory: str | None) -> OutOfMemory | None:
    """The failed allocation as the rank wrote it, or with nothing known but that there was one."""
    if memory is None:
        return None
    if written is not None and written.out_of_memory is not None:
        return written.out_of_memory
    nothing = {"requested_bytes": None, "limit_bytes": None, "allocated_bytes": None}
    return OutOfMemory(memory=memory, largest=[], **nothing)


def _exit_kind(end: RankEnd, status: Status) -> str:
    if end.node_lost is not None:
        return NODE_LOST
    if end.exit_code is not None and end.exit_code < 0:
        return signal.Signals(-end.exit_code).name
    return status.value


_UNCHECKED = (
    "a library used memory that the limit had refused it; if that looks wrong, try it without"
    " cluster.memory_limit_gib"
)


def _exit_message(end: RankEnd, status: Status) -> str:
    messages = {
        Status.KILLED: "killed by another process; the kernel does so when host memory runs out: see dmesg",
        Status.CRASHED: "ended by a signal; its log ends with the stack",
        Status.TIMED_OUT: "still running at the deadline; raise measure.timeout_s, or see where in its log",
        Status.OUT_OF_MEMORY: _UNCHECKED
        if end.exit_code in UNCHECKED_ENDS
        else "an allocation failed; the error gives no size",
        Status.ERROR: f"exited with code {end.exit_code} and no result; the end of its log may say why",
    }
    if status is Status.ERROR and end.exit_code is None:
        return "did not end after other ranks had lost a peer, and was stopped; compare the logs of all ranks"
    return messages.get(status, status.value)
