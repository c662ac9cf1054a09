"""How a rank ended, and what the ends of all ranks say about the cell."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.gates import WrongResultError
from bench.record import Failure, Status

OUT_OF_MEMORY_TEXTS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA out of memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "std::bad_alloc",
)
OUT_OF_MEMORY_KINDS = ("OutOfMemoryError", "MemoryError")
VICTIM_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Application timeout caused pair closure",
    "remote process exited",
)


@dataclass(frozen=True, slots=True)
class RankEnd:
    """`exit_code` is negative for a signal and None for a rank that had to be stopped.

    `report` is there only when every pass was done, `failure` only when the rank could still write one.
    """

    rank: int
    exit_code: int | None
    report: dict[str, Any] | None
    failure: dict[str, Any] | None
    log_tail: str


def classify(ends: Sequence[RankEnd]) -> tuple[Status, Failure | None]:
    """The cell's status and whom to blame. The worst cause wins over those it dragged along."""
    if all(end.report is not None for end in ends):
        return Status.OK, None
    for status, blames in CAUSES:
        culprit = next((end for end in ends if blames(end)), None)
        if culprit is not None:
            return status, _failure(culprit, status)
    return Status.ERROR, _failure(ends[0], Status.ERROR)


def _ran_out_of_memory(end: RankEnd) -> bool:
    failure = end.failure or {"kind": "", "message": end.log_tail}
    return failure["kind"] in OUT_OF_MEMORY_KINDS or any(
        text in failure["message"] for text in OUT_OF_MEMORY_TEXTS
    )


def _was_killed(end: RankEnd) -> bool:
    return end.exit_code in (-signal.SIGKILL, -signal.SIGTERM)


def _crashed(end: RankEnd) -> bool:
    return end.exit_code is not None and end.exit_code < 0 and not _was_killed(end)


def _raised(end: RankEnd) -> bool:
    return end.failure is not None and not any(text in end.failure["message"] for text in VICTIM_TEXTS)


def _hung(end: RankEnd) -> bool:
    return end.exit_code is None


def _left_without_result(end: RankEnd) -> bool:
    return end.exit_code is not None and end.report is None and end.failure is None


def _any(_: RankEnd) -> bool:
    return True


def _gate_failed(end: RankEnd) -> bool:
    return end.failure is not None and end.failure["kind"] == WrongResultError.__name__


CAUSES = (
    (Status.WRONG_RESULT, _gate_failed),
    (Status.OUT_OF_MEMORY, _ran_out_of_memory),
    (Status.KILLED, _was_killed),
    (Status.CRASHED, _crashed),
    (Status.ERROR, _raised),
    (Status.ERROR, _left_without_result),
    (Status.TIMED_OUT, _hung),
    (Status.ERROR, _any),
)


def _failure(end: RankEnd, status: Status) -> Failure:
    told = end.failure or {}
    return Failure(
        rank=end.rank,
        phase=told.get("phase"),
        kind=told.get("kind") or _exit_kind(end, status),
        message=told.get("message") or _exit_message(end, status),
        log_tail=end.log_tail,
    )


def _exit_kind(end: RankEnd, status: Status) -> str:
    if end.exit_code is not None and end.exit_code < 0:
        return signal.Signals(-end.exit_code).name
    return status.value


def _exit_message(end: RankEnd, status: Status) -> str:
    messages = {
        Status.KILLED: "killed from outside; the kernel does so when host memory runs out: see dmesg",
        Status.CRASHED: "died without a Python traceback; the end of its log may tell why",
        Status.TIMED_OUT: "still running at the deadline; raise measure.timeout_s if it was only slow",
        Status.ERROR: f"left with exit code {end.exit_code} and no result",
    }
    return messages.get(status, status.value)
