"""Node on the launcher's own machine, whose ranks are processes of its fork server."""

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
from bench.ranks.log import RankState, rank_state_path, read_rank_state
from bench.run.node.job import (
    NodeJob,
    RankEntry,
    RankJob,
    failure_path,
    log_path,
    read_json,
    read_log_tail,
    report_path,
    take_json,
)
from bench.run.node.ranks import NodeEvent, RankEnd, RankEnded, RankFailed, RankFailure, is_lost_peer_failure
from bench.run.node.server import ForkServer, enter_rank
from bench.run.node.stacks import RankActivity, ask_for_stacks

LOOK_S = 1.0
"""Shortest time between two readings of the ranks' state files, in seconds."""


class LocalNode:
    """Starts ranks on this machine."""

    lost_reason = None
    description = None
    store = None

    def __init__(self) -> None:
        self._server = ForkServer()
        self.interface: str | None = None
        """Network interface that leads to the other nodes; None without other nodes."""

    def warm(self) -> None:
        self._server.warm()

    def import_all(self) -> None:
        """Import what ranks need and wait until that is done, so that ranks start quickly afterwards."""
        self.warm()
        process = self._server.create_process(int)
        process.start()
        process.join()

    def start(self, job: NodeJob, folder: Path, entry: RankEntry | None = None) -> LocalRanks:
        self.warm()
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("rank_*.json"):
            leftover.unlink()
        scratch = tempfile.TemporaryDirectory(prefix="ulysses-ring-bench-")
        receiver, sender = Pipe(duplex=False)
        ranks = LocalRanks(job, folder, scratch, receiver)
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
                    skipped_passes=job.skipped_passes,
                )
                ranks.start(rank, self._server.create_process(enter_rank, rank_job, sender, entry))
            sender.close()
        except BaseException:
            ranks.stop()
            raise
        return ranks


class LocalRanks:
    """Ranks of one cell, as processes on this machine."""

    def __init__(
        self, job: NodeJob, folder: Path, scratch: tempfile.TemporaryDirectory[str], receiver: Connection
    ) -> None:
        """Take the folder of the ranks' state files and the pipe on which they report; start no rank yet."""
        self.ranks = job.ranks
        self._cluster = job.cell.cluster
        self._folder = folder
        self._scratch = scratch
        self._receiver: Connection | None = receiver
        self._processes: dict[int, BaseProcess] = {}
        self._ended_at_s: dict[int, float] = {}
        """Times at which ranks have ended by themselves."""
        self._states: dict[int, RankState | None] = {}
        self._has_stopped = False
        self._stopped_at_s = 0.0
        self._counted_at_s = 0.0

    def start(self, rank: int, process: BaseProcess) -> None:
        """Start the process of a rank in another thread, which no signal interrupts.

        In the main thread, a signal during `process.start()` would leave a process with an unknown PID, which
        could not be ended.
        """

        def start() -> None:
            process.start()
            self._processes[rank] = process

        with ThreadPoolExecutor(1) as starter:
            starter.submit(start).result()

    def waitables(self) -> list[Connection | int]:
        pipe = [] if self._receiver is None else [self._receiver]
        return [*pipe, *(process.sentinel for _, process in self._running())]

    def take_events(self) -> list[NodeEvent]:
        ready = wait(self.waitables(), timeout=0)
        events = self._receive() if self._receiver in ready else []
        for rank, process in self._running():
            if process.sentinel in ready:
                process.join()
                self._ended_at_s[rank] = time.monotonic()
                if not report_path(self._folder, rank).exists():
                    failure = self._failure(rank)
                    events.append(RankFailed(rank, failure is not None and is_lost_peer_failure(failure)))
                events.append(RankEnded(rank))
        return events

    def count_progress(self) -> int | None:
        if time.monotonic() - self._counted_at_s < LOOK_S:
            return None
        self._counted_at_s = time.monotonic()
        states = (self._state(rank) for rank in self.ranks)
        return sum(state.count for state in states if state is not None)

    def ask_for_activity(self, wait_s: float) -> dict[int, RankActivity]:
        live = self.pids
        with_handler = {
            rank: (pid, log_path(self._folder, rank))
            for rank, pid in live.items()
            if self._state(rank) is not None
        }
        activities = ask_for_stacks(with_handler, self._cluster.device, wait_s)
        idle = self._idle_ranks()
        return {
            rank: replace(
                activities.get(rank, RankActivity()), is_stopped=_is_stopped(pid), is_idle=rank in idle
            )
            for rank, pid in live.items()
        }

    def stop(self) -> None:
        if self._has_stopped:
            return
        self._has_stopped = True
        for process in self._processes.values():
            _kill(process)
        for process in self._processes.values():
            process.join()
        self._stopped_at_s = time.monotonic()
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._states = {rank: self._state(rank) for rank in self._processes}
        self._scratch.cleanup()

    def ends(self) -> list[RankEnd]:
        return [self._end(rank) for rank in self.ranks]

    def _running(self) -> list[tuple[int, BaseProcess]]:
        return [item for item in self._processes.items() if item[0] not in self._ended_at_s]

    @property
    def pids(self) -> dict[int, int]:
        """Process number of each rank that has not ended."""
        return {rank: process.pid for rank, process in self._running() if process.pid is not None}

    def _idle_ranks(self) -> set[int]:
        """Return the ranks whose GPU is idle; no rank if ranks share GPUs or the driver does not tell."""
        if self._cluster.device != "cuda" or self._cluster.ranks_per_gpu > 1:
            return set()
        idle = idle_gpus()
        return {rank for device, rank in enumerate(self.ranks) if device in idle}

    def _state(self, rank: int) -> RankState | None:
        """Return the state that a rank recorded; None until its stack handler is installed."""
        return read_rank_state(rank_state_path(Path(self._scratch.name), rank))

    def _receive(self) -> list[NodeEvent]:
        """Read the events in the pipe, and close it once the last rank has ended."""
        events: list[NodeEvent] = []
        while self._receiver is not None and self._receiver.poll():
            try:
                events.append(self._receiver.recv())
            except EOFError:
                self._receiver.close()
                self._receiver = None
        return events

    def _failure(self, rank: int) -> RankFailure | None:
        """Return the failure that a rank wrote, or None if it wrote none."""
        content = read_json(failure_path(self._folder, rank))
        return None if content is None else convert(content, RankFailure)

    def _end(self, rank: int) -> RankEnd:
        ended_at_s = self._ended_at_s.get(rank)
        report = take_json(report_path(self._folder, rank))
        failure = self._failure(rank)
        failure_path(self._folder, rank).unlink(missing_ok=True)
        failed_at_s = ended_at_s if failure is None else failure.failed_at_s
        return RankEnd(
            rank,
            None if ended_at_s is None else self._processes[rank].exitcode,
            report,
            failure,
            read_log_tail(log_path(self._folder, rank)),
            None if failed_at_s is None else self._stopped_at_s - failed_at_s,
            self._states.get(rank),
        )


def _is_stopped(pid: int) -> bool:
    """Return whether a signal such as SIGSTOP has stopped this process."""
    with suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def _kill(process: BaseProcess) -> None:
    """Kill a rank and the processes that it started: a rank leads its own process group."""
    if process.pid is None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
