"""Fresh ranks for every cell, forked from a server that has imported everything already.

The standard library's fork server, not torch elastic's agent: its ranks may leave by `os._exit` (see
`worker`), and a death wakes the launcher at once instead of at the next poll.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config import RunConfig
from bench.environment import REPOSITORY
from bench.rank_end import RankEnd

if TYPE_CHECKING:
    from bench.worker import RankEntry

GRACE_S = 3.0
"""How long the others may write their own reports once one rank has failed."""
LOG_TAIL_BYTES = 4000
PRELOAD = ["bench.preload"]

Tell = Callable[[str], None]


class Launcher:
    """Starts the ranks of one cell at a time. Imports no torch and never touches CUDA."""

    def __init__(self) -> None:
        # CPU ranks must not probe for accelerators; a server once started keeps its environment.
        os.environ.setdefault("DS_LOG_LEVEL", "warning")
        # Ranks are told their threads; of a value that is no number OpenMP complains on the user's screen.
        if not os.environ.get("OMP_NUM_THREADS", "1").strip("0").isdigit():
            del os.environ["OMP_NUM_THREADS"]
        # The server finds modules by its environment alone: no other installed copy may win over this one.
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(REPOSITORY) not in known:
            os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, known)])
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(PRELOAD)

    def warm(self) -> None:
        """Start the server and its imports now, in the background."""
        from multiprocessing import forkserver

        forkserver.ensure_running()

    def run(
        self,
        cell: RunConfig,
        folder: Path,
        *,
        entry: RankEntry | None = None,
        tell: Tell = lambda _: None,
        parity_is_known: bool = False,
    ) -> list[RankEnd]:
        """Run a cell's ranks to their ends, by the deadline at the latest; none is left when it returns."""
        folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + cell.measure.timeout_s
        receiver, sender = self._context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory(prefix="ulysses-ring-bench-") as meeting:
            jobs = [
                (cell, rank, folder, Path(meeting) / "store", parity_is_known)
                for rank in range(cell.cluster.world_size)
            ]
            ranks = [self._context.Process(target=_enter, args=(job, sender, entry)) for job in jobs]
            try:
                for process in ranks:
                    process.start()
                sender.close()
                finished = _watch(ranks, folder, receiver, deadline, tell)
            finally:
                for process in ranks:
                    _kill(process)
                receiver.close()
        return [_end(folder, rank, finished.get(rank)) for rank in range(len(ranks))]


def _enter(told: tuple[Any, ...], sender: Connection, entry: RankEntry | None) -> None:
    """The first function of a rank: everything it needs is imported in the server already."""
    from bench.worker import RankJob, live, run_cell

    job = RankJob(*told)
    tell: Tell = sender.send if job.rank == 0 else lambda _: None
    live(job, tell, entry or run_cell)


def _watch(
    ranks: Sequence[BaseProcess], folder: Path, receiver: Connection, deadline: float, tell: Tell
) -> dict[int, int]:
    """Exit codes of the ranks that ended by themselves, in time."""
    finished: dict[int, int] = {}
    open_pipe = [receiver]
    while len(finished) < len(ranks):
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            break
        pending = [process.sentinel for rank, process in enumerate(ranks) if rank not in finished]
        ready = wait([*pending, *open_pipe], timeout=left_s)
        if receiver in ready:
            try:
                tell(receiver.recv())
            except EOFError:
                open_pipe = []
        for rank, process in enumerate(ranks):
            if rank not in finished and process.sentinel in ready:
                process.join()
                finished[rank] = process.exitcode if process.exitcode is not None else 1
                if not _report(folder, rank).exists():
                    deadline = min(deadline, time.monotonic() + GRACE_S)
    return finished


def _kill(process: BaseProcess) -> None:
    """End a rank and whatever it started; a rank leads its own process group."""
    if process.pid is None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _end(folder: Path, rank: int, exit_code: int | None) -> RankEnd:
    report, failure = _take(_report(folder, rank)), _take(folder / f"rank_{rank}.failure.json")
    return RankEnd(rank, exit_code, report, failure, _tail(folder / f"rank_{rank}.log"))


def _report(folder: Path, rank: int) -> Path:
    """What a rank leaves when it has done everything: an exit code of 0 is no proof of that."""
    return folder / f"rank_{rank}.report.json"


def _take(path: Path) -> dict[str, Any] | None:
    """Read a rank's file and remove it: what it says goes into the record."""
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    path.unlink()
    return content


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    return path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
