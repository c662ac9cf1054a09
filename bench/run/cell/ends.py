"""Status and failure of a cell, derived from the ends of its ranks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.ranks.log import JOIN, RefusedError, WrongResultError
from bench.ranks.out_of_memory import resource_by_text
from bench.record.record import Failure, OutOfMemory, Status
from bench.run.node.ranks import LOST_PEER_TEXTS, RankEnd, RankFailure, is_lost_peer_failure

NODE_LOST = "NODE_LOST"
"""Kind of the failure of a node that is out of reach."""
PHASES_BEFORE_LIMIT = ("start", JOIN, "strategy", "limit")
"""Phases in which the memory limit is not yet in force."""
UNCHECKED_ALLOCATION_CODES = (-signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)
"""Exit codes of a process that used memory without checking whether its allocation had failed."""


def classify(ends: Sequence[RankEnd], *, limited: bool = False) -> tuple[Status, Failure | None]:
    """Return the status of a cell, and the failure of the rank that caused it; None if all ranks finished.

    Args:
        ends: Ends of all ranks. If several failed, the order of CAUSES decides which one counts.
        limited: Whether the ranks had a memory limit on a CPU, which then explains more errors.
    """
    if all(end.report is not None for end in ends):
        return Status.OK, None
    ranks = CellEnds(ends, limited)
    for status, is_cause in CAUSES:
        first = next((end for end in ends if is_cause(end, ranks)), None)
        if first is not None:
            return status, _failure(first, status, ranks)
    return Status.ERROR, _failure(ends[0], Status.ERROR, ranks)


@dataclass(frozen=True, slots=True)
class CellEnds:
    """Ends of all ranks of a cell, for causes that depend on more than one rank."""

    ends: Sequence[RankEnd]
    limited: bool

    def exhausted_memory(self, end: RankEnd) -> str | None:
        """Return the memory that a rank ran out of, or None if it did not.

        The failure that the rank wrote decides. If there is none, its signal and the end of its log decide.
        """
        failure = end.failure
        if failure is None:
            if end.report:
                return None
            return self._memory_of_signal(end) or self._memory_by_texts(end.log_tail.splitlines())
        if failure.out_of_memory is not None:
            return failure.out_of_memory.memory
        return self._memory_by_texts([f"{failure.kind}: {failure.message}"])

    def _memory_by_texts(self, texts: Sequence[str]) -> str | None:
        """Return the exhausted memory that the first of these texts to name one names."""
        memories = (resource_by_text(text, limited=self.limited).memory for text in texts)
        return next(filter(None, memories), None)

    def _memory_of_signal(self, end: RankEnd) -> str | None:
        """Return `host` if the signal of the rank comes from an allocation that the memory limit refused."""
        is_in_force = self.limited and end.state is not None and end.state.phase not in PHASES_BEFORE_LIMIT
        return "host" if is_in_force and end.exit_code in UNCHECKED_ALLOCATION_CODES else None

    @property
    def reached_deadline(self) -> bool:
        """Whether no rank had failed when the ranks were stopped."""
        return not any(end.exit_code is not None and end.report is None for end in self.ends)


def _was_killed(end: RankEnd, _: CellEnds) -> bool:
    return end.exit_code in (-signal.SIGKILL, -signal.SIGTERM)


def _has_crashed(end: RankEnd, ranks: CellEnds) -> bool:
    by_signal = end.exit_code is not None and end.exit_code < 0
    return by_signal and not _was_killed(end, ranks) and not _is_watchdog_abort(end)


def _is_watchdog_abort(end: RankEnd) -> bool:
    """Return whether NCCL's watchdog aborted the rank because a peer had ended.

    Such a rank cannot write a failure.
    """
    aborted = end.failure is None and end.exit_code == -signal.SIGABRT
    return aborted and any(text in end.log_tail for text in LOST_PEER_TEXTS)


def _has_raised(end: RankEnd, kind: type[Exception]) -> bool:
    return end.failure is not None and end.failure.kind == kind.__name__


def _ended_without_result(end: RankEnd, _: CellEnds) -> bool:
    is_silent = end.exit_code is not None and end.report is None and end.failure is None
    return is_silent and not _is_watchdog_abort(end)


CAUSES: Sequence[tuple[Status, Callable[[RankEnd, CellEnds], bool]]] = (
    (Status.UNSUPPORTED, lambda end, _: _has_raised(end, RefusedError)),
    (Status.WRONG_RESULT, lambda end, _: _has_raised(end, WrongResultError)),
    (Status.OUT_OF_MEMORY, lambda end, ranks: ranks.exhausted_memory(end) is not None),
    (Status.KILLED, lambda end, _: end.node_lost is not None),
    (Status.KILLED, _was_killed),
    (Status.CRASHED, _has_crashed),
    (Status.ERROR, lambda end, _: end.failure is not None and not is_lost_peer_failure(end.failure)),
    (Status.ERROR, _ended_without_result),
    (Status.TIMED_OUT, lambda end, _: end.hang is not None),
    (Status.TIMED_OUT, lambda end, ranks: end.exit_code is None and ranks.reached_deadline),
    # Stopped long before the deadline, because other ranks had lost a peer.
    (Status.ERROR, lambda end, _: end.exit_code is None and end.failure is None),
)
"""Causes of a failed cell, each with the status of the cell. The first cause that holds for a rank counts."""


def _failure(end: RankEnd, status: Status, ranks: CellEnds) -> Failure:
    # A rank that kept the others waiting may fail when they are stopped. That later error is not the cause.
    is_hang = status is Status.TIMED_OUT and end.hang is not None
    written = None if is_hang else end.failure
    last_state = written or end.state
    return Failure(
        rank=end.rank,
        phase=None if last_state is None else last_state.phase,
        kind=_exit_kind(end, status) if written is None else written.kind,
        message=_message(end, written, status),
        log_tail=end.log_tail,
        step_phase=None if last_state is None else last_state.step_phase,
        detected_after_s=end.detected_after_s,
        out_of_memory=_out_of_memory(written, ranks.exhausted_memory(end)),
        node=end.node,
    )


def _message(end: RankEnd, written: RankFailure | None, status: Status) -> str:
    if end.node_lost is not None:
        what = "the cell did not run" if end.node is None else "its node is lost"
        return (
            f"{what}: {end.node_lost}; a lost node does not come back within a sweep, so start the sweep"
            " again with resume=true"
        )
    return (written and written.message) or end.hang or _exit_message(end, status)


def _out_of_memory(written: RankFailure | None, memory: str | None) -> OutOfMemory | None:
    """Return the failed allocation as the rank wrote it, or one without sizes if the rank wrote none.

    Return None if no memory ran out.
    """
    if memory is None:
        return None
    if written is not None and written.out_of_memory is not None:
        return written.out_of_memory
    return OutOfMemory(
        memory=memory, requested_bytes=None, limit_bytes=None, allocated_bytes=None, largest=[]
    )


def _exit_kind(end: RankEnd, status: Status) -> str:
    if end.node_lost is not None:
        return NODE_LOST
    if end.exit_code is not None and end.exit_code < 0:
        return signal.Signals(-end.exit_code).name
    return status.value


_UNCHECKED_ALLOCATION = (
    "crashed under the memory limit, probably in a library that does not check whether an allocation failed;"
    " to rule out another cause, run the cell without cluster.memory_limit_gib"
)


def _exit_message(end: RankEnd, status: Status) -> str:
    messages = {
        Status.KILLED: "killed by another process; run dmesg to see if Linux did it for lack of memory",
        Status.TIMED_OUT: "the cell did not end within measure.timeout_s; the end of this rank's log shows"
        " where it was; if the cell is only slow, raise measure.timeout_s",
        Status.OUT_OF_MEMORY: _UNCHECKED_ALLOCATION
        if end.exit_code in UNCHECKED_ALLOCATION_CODES
        else "an allocation failed, and the error does not say of how many bytes",
        Status.ERROR: f"exited with code {end.exit_code} and no result; look for the reason in its log",
    }
    if status is Status.CRASHED:
        full = ", perhaps because /dev/shm is full" if end.exit_code == -signal.SIGBUS else ""
        return f"ended by {_exit_kind(end, status)}{full}; its stack is at the end of its log"
    if status is Status.ERROR and end.exit_code is None:
        return (
            "was stopped because it still ran after other ranks had lost their connection to a peer; compare"
            " the logs of all ranks to find the first that failed"
        )
    return messages.get(status, status.value)
