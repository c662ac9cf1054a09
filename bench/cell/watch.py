"""A cell's ranks from their start to their ends: who has ended, who hangs, who has had its time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Protocol

from bench.cell.hang import Blame, HangWatch, LiveRank, blamed_at_deadline
from bench.node.compilation import CompilationWatch
from bench.node.end import RankEnd, RankFailed, lost_a_peer
from bench.node.rank_files import failure_path, log_path, read_file, report_path, tail_of, take_file
from bench.node.stacks import ask_for_stacks
from bench.ranks.log import Stage
from bench.ranks.place import Place, place_path, read_place

GRACE_S = 3.0
"""How long the others have to write their own reports once one rank has failed."""
LOST_PEER_GRACE_S = 20.0
"""The same where a rank failed because it lost a peer, which may still be cleaning up before it reports."""
TICK_S = 1.0
"""How often a listener is called: enough for a display, and no load on the ranks' cores."""


class Listener(Protocol):
    """Is told of a cell while it runs, in the launcher's own thread."""

    def tell(self, stage: Stage) -> None:
        """The first rank has begun this."""

    def compiles(self, what: str | None) -> None:
        """What a rank waits for a compiler for, in words; None where none runs."""

    def tick(self) -> None:
        """Time has passed: about every TICK_S seconds while ranks run."""


class Silent:
    """A listener that does nothing."""

    def tell(self, stage: Stage) -> None: ...

    def compiles(self, what: str | None) -> None: ...

    def tick(self) -> None: ...


SILENT = Silent()


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a rank that was not stopped."""

    code: int
    at_s: float
    """By the monotonic clock."""


class Watch:
    """Follows the ranks of a cell until they have ended or are to be ended."""

    def __init__(
        self, ranks: Sequence[BaseProcess], folder: Path, scratch: Path, hang_watch: HangWatch
    ) -> None:
        self._ranks = ranks
        self._folder = folder
        self._scratch = scratch
        self._hang_watch = hang_watch
        self._finished: dict[int, Exit] = {}
        self._blame: Blame | None = None

    def follow(self, receiver: Connection, deadline: float, listener: Listener) -> None:
        """Wait until every rank has ended, hangs, or has had its time; ask those that have not for stacks."""
        open_pipe, failed, compilation = [receiver], list[int](), CompilationWatch()
        while len(self._finished) < len(self._ranks):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._ask_for_stacks(has_time=not failed)
                return
            pending = [
                process.sentinel for rank, process in enumerate(self._ranks) if rank not in self._finished
            ]
            ready = wait([*pending, *open_pipe], timeout=min(left_s, TICK_S))
            new = []
            if receiver in ready:
                message = _receive(receiver)
                open_pipe = [] if message is None else open_pipe
                if isinstance(message, RankFailed):
                    new.append(message.rank)
                elif message is not None:
                    listener.tell(message)
            listener.compiles(compilation.found(time.monotonic(), [each.pid for each in self._live()]))
            listener.tick()
            ended = {r: process for r, process in enumerate(self._ranks) if process.sentinel in ready}
            self._finished |= {rank: Exit(_exit_code(each), time.monotonic()) for rank, each in ended.items()}
            new += [rank for rank in ended if not report_path(self._folder, rank).exists()]
            deadline = min([deadline, *(time.monotonic() + _grace_s(self._folder, rank) for rank in new)])
            failed += new
            if not failed:
                self._blame = self._hang_watch.found(time.monotonic(), self._live())
            if self._blame is not None:
                return

    def ends(self, over_s: float) -> list[RankEnd]:
        """How each rank ended, all being over at this time of the monotonic clock."""
        return [self._end(rank, over_s) for rank in range(len(self._ranks))]

    def _live(self) -> list[LiveRank]:
        return [
            LiveRank(rank, process.pid, log_path(self._folder, rank), answers=self._place(rank) is not None)
            for rank, process in enumerate(self._ranks)
            if rank not in self._finished and process.pid is not None
        ]

    def _place(self, rank: int) -> Place | None:
        return read_place(place_path(self._scratch, rank))

    def _ask_for_stacks(self, *, has_time: bool) -> None:
        """Have ranks that are about to be stopped write their stacks into their logs."""
        if has_time:
            self._blame = blamed_at_deadline(self._live())
        else:
            ask_for_stacks({each.rank: (each.pid, each.log) for each in self._live() if each.answers})

    def _end(self, rank: int, over_s: float) -> RankEnd:
        left, place = self._finished.get(rank), self._place(rank)
        report, failure = (
            take_file(report_path(self._folder, rank)),
            take_file(failure_path(self._folder, rank)),
        )
        failed_at_s = left.at_s if left is not None else None
        if failure is not None:
            failed_at_s = failure.pop("failed_at_s")
        return RankEnd(
            rank,
            None if left is None else left.code,
            report,
            failure,
            tail_of(log_path(self._folder, rank)),
            None if failed_at_s is None else over_s - failed_at_s,
            place,
            self._blame.what if self._blame is not None and self._blame.rank == rank else None,
        )


def _receive(receiver: Connection) -> Stage | RankFailed | None:
    """A rank's message; None when the last rank has ended."""
    try:
        message: Stage | RankFailed = receiver.recv()
    except EOFError:
        return None
    return message


def _exit_code(process: BaseProcess) -> int:
    process.join()
    return process.exitcode if process.exitcode is not None else 1


def _grace_s(folder: Path, rank: int) -> float:
    """How long to wait for the other ranks, by why this one failed."""
    failure = read_file(failure_path(folder, rank))
    return LOST_PEER_GRACE_S if failure is not None and lost_a_peer(failure) else GRACE_S
