"""This machine as a node: its ranks are processes of its fork server."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil
from msgspec import convert

from bench.common.nvml import idle_gpus
from bench.ranks.log import RankState, place_path, read_place
from bench.run.node.job import (
    NodeJob,
    RankEntry,
    RankJob,
    failure_path,
    log_path,
    read_file,
    report_path,
    tail_of,
    take_file,
)
from bench.run.node.ranks import Failing, Left, News, RankEnd, RankFailure, lost_a_peer
from bench.run.node.server import ForkServer, enter_rank
from bench.run.node.stacks import Doing, ask_for_stacks

LOOK_S = 1.0
"""How often to look at the most."""


class LocalNode:
    """Starts ranks on this machine."""

    lost = None
    description = None
    store = None

    def __init__(self) -> None:
        self._server = ForkServer()
        self.interface: str | None = None
        """Of the network that leads to other nodes, where there are any."""

    def warm(self) -> None:
        self._server.warm()

    def import_all(self) -> None:
        """Import what ranks need and wait for the end: a rank then starts in a moment."""
        self.warm()
        process = self._server.process(int)
        process.start()
        process.join()

    def start(self, job: NodeJob, folder: Path, entry: RankEntry | None = None) -> LocalRanks:
        self.warm()
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("rank_*.json"):
            leftover.unlink()
        scratch = tempfile.TemporaryDirectory(prefix="ulysses-ring-bench-")
        receiver, sender = Pipe(duplex=False)
        started = LocalRanks(job, folder, scratch, receiver)
        try:
            for local_rank, rank in enumerate(job.ranks):
                rank_job = RankJob(
                    cell=job.cell,
                    rank=rank,
                    folder=folder,
                    scratch=Path(scratch.name),
                    rendezvous=job.store or Path(scratch.name) / "store",
                    local_rank=local_rank,
                    local_world_size=len(job.ranks),
                    interface=None if job.store is None else self.interface,
                    known=job.known,
                )
                started.add(rank, self._server.process(enter_rank, rank_job, sender, entry))
            sender.close()
        except BaseException:
            started.stop()
            raise
        return started


class LocalRanks:
    """Ranks of one cell that are processes of this machine."""

    def __init__(
        self, job: NodeJob, folder: Path, scratch: tempfile.TemporaryDirectory[str], receiver: Connection
    ) -> None:
        """`scratch` holds the ranks' notes of their places, `receiver` is where they tell of themselves."""
        self.ranks = job.ranks
        self._cluster = job.cell.cluster
        self._folder = folder
        self._scratch = scratch
        self._receiver: Connection | None = receiver
        self._processes: dict[int, BaseProcess] = {}
        self._left_s: dict[int, float] = {}
        """When ranks ended that were not stopped."""
        self._places: dict[int, RankState | None] = {}
        self._is_over = False
        self._over_s = 0.0
        self._looked_s = 0.0

    def add(self, rank: int, process: BaseProcess) -> None:
        """Start a rank as one of these.

        Signals interrupt the main thread only: of a process whose start they cut short nobody knows the
        number, so that nobody could end it.
        """
        with ThreadPoolExecutor(1) as starter:
            starter.submit(self._start, rank, process).result()

    def waits(self) -> list[Connection | int]:
        pipe = [] if self._receiver is None else [self._receiver]
        return [*pipe, *(process.sentinel for _, process in self._running())]

    def news(self) -> list[News]:
        ready = wait(self.waits(), timeout=0)
        found = self._received() if self._receiver in ready else []
        for rank, process in self._running():
            if process.sentinel in ready:
                process.join()
                self._left_s[rank] = time.monotonic()
                if not report_path(self._folder, rank).exists():
                    failure = self._failure(rank)
                    found.append(Failing(rank, failure is not None and lost_a_peer(failure)))
                found.append(Left(rank))
        return found

    def look(self) -> int | None:
        if time.monotonic() - self._looked_s < LOOK_S:
            return None
        self._looked_s = time.monotonic()
        places = (self._place(rank) for rank in self.ranks)
        return sum(place.count for place in places if place is not None)

    def ask(self, wait_s: float) -> dict[int, Doing]:
        live = self.pids
        answering = {
            rank: (pid, log_path(self._folder, rank))
            for rank, pid in live.items()
            if self._place(rank) is not None
        }
        doing, idle = ask_for_stacks(answering, self._cluster.device, wait_s), self._idle()
        return {
            rank: replace(doing.get(rank, Doing()), is_stopped=_is_stopped(pid), is_idle=rank in idle)
            for rank, pid in live.items()
        }

    def stop(self) -> None:
        if self._is_over:
            return
        self._is_over = True
        for process in self._processes.values():
            _kill(process)
        for process in self._processes.values():
            process.join()
        self._over_s = time.monotonic()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._places = {rank: self._place(rank) for rank in self._processes}
        self._scratch.cleanup()

    def ends(self) -> list[RankEnd]:
        return [self._end(rank) for rank in self.ranks]

    def _start(self, rank: int, process: BaseProcess) -> None:
        process.start()
        self._processes[rank] = process

    def _running(self) -> list[tuple[int, BaseProcess]]:
        return [(rank, each) for rank, each in self._processes.items() if rank not in self._left_s]

    @property
    def pids(self) -> dict[int, int]:
        """The process of each rank that has not ended."""
        return {rank: process.pid for rank, process in self._running() if process.pid is not None}

    def _idle(self) -> set[int]:
        """Ranks whose own GPU has nothing to do; none where ranks share one, or the driver does not say."""
        if self._cluster.device != "cuda" or self._cluster.ranks_per_gpu > 1:
            return set()
        idle = idle_gpus()
        return {rank for device, rank in enumerate(self.ranks) if device in idle}

    def _place(self, rank: int) -> RankState | None:
        """It is there once a rank can be asked for its stack."""
        return read_place(place_path(Path(self._scratch.name), rank))

    def _received(self) -> list[News]:
        """Take what ranks have sent by now; they send nothing more once the last one has ended."""
        found: list[News] = []
        while self._receiver is not None and self._receiver.poll():
            try:
                found.append(self._receiver.recv())
            except EOFError:
                self._receiver.close()
                self._receiver = None
        return found

    def _failure(self, rank: int) -> RankFailure | None:
        """Return the failure that a rank wrote; None where it wrote none."""
        content = read_file(failure_path(self._folder, rank))
        return None if content is None else convert(content, RankFailure)

    def _end(self, rank: int) -> RankEnd:
        left_s = self._left_s.get(rank)
        report = take_file(report_path(self._folder, rank))
        failure = self._failure(rank)
        failure_path(self._folder, rank).unlink(missing_ok=True)
        failed_at_s = left_s if failure is None else failure.failed_at_s
        return RankEnd(
            rank,
            None if left_s is None else self._processes[rank].exitcode,
            report,
            failure,
            tail_of(log_path(self._folder, rank)),
            None if failed_at_s is None else self._over_s - failed_at_s,
            self._places.get(rank),
        )


def _is_stopped(pid: int) -> bool:
    """Whether a signal has stopped this process."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def _kill(process: BaseProcess) -> None:
    """End a rank and whatever it started; a rank leads its own process group."""
    if process.pid is None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
