"""Fresh ranks for every cell, forked from a server that has imported everything already.

The standard library's fork server, not torch elastic's agent: its ranks may leave by `os._exit` (see
`worker`), and a rank's end wakes the launcher at once instead of at the next poll.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from bench.cell.compilation import CompilationWatch
from bench.cell.ends import RankEnd, RankFailed, lost_a_peer
from bench.cell.hang import Blame, HangWatch, LiveRank, blamed_at_deadline
from bench.cell.lifeline import die_with_launcher
from bench.cell.stacks import ask_for_stacks
from bench.config import ConfigError, RunConfig
from bench.environment import REPOSITORY
from bench.ranks.log import Stage
from bench.ranks.place import Place, place_path, read_place

if TYPE_CHECKING:
    from bench.cell.worker import RankEntry

GRACE_S = 3.0
"""How long the others have to write their own reports once one rank has failed."""
LOST_PEER_GRACE_S = 20.0
"""The same where a rank failed because it lost a peer, which may still be cleaning up before it reports."""
LOG_TAIL_BYTES = 8000
"""Enough for the reason that NCCL's watchdog prints: up to 4,000 bytes of C++ stacks follow it."""
PRELOAD = "bench.cell.preload"
PRELOADED_OF_PACKAGES: Mapping[str, str] = {"deepspeed": "bench.cell.preload_deepspeed"}
"""What the server imports of packages that only some cells need."""
SAFE_PATH = "PYTHONSAFEPATH"
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


class Launcher:
    """Starts the ranks of one cell at a time. Imports no torch and never touches CUDA."""

    def __init__(self, packages: Collection[str] | None = None) -> None:
        """The server will import what needs these packages of others; by default all that any cell may need.

        A cell for which that was not enough imports the rest in its ranks.
        """
        self._preload = [
            *(
                module
                for package, module in PRELOADED_OF_PACKAGES.items()
                if packages is None or package in packages
            ),
            PRELOAD,
        ]
        # A server once started keeps its environment.
        os.environ.setdefault("DS_LOG_LEVEL", "warning")
        # When it is imported, DeepSpeed starts CUDA to see whether there is any, unless it is told which
        # accelerator to use. `join_deepspeed` corrects it in ranks on a GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # Nor may another library start CUDA while the server imports it: no rank forked after that could use
        # a GPU. With this, torch asks NVML.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        # What packages read, such as their own sources, is UTF-8 whatever the locale says.
        os.environ["PYTHONUTF8"] = "1"
        # OpenMP complains about a value that is not a number, and needs none: ranks are told their threads.
        if not os.environ.get("OMP_NUM_THREADS", "1").strip("0").isdigit():
            del os.environ["OMP_NUM_THREADS"]
        # The server finds modules by its environment alone, and must not find another installed copy of ours.
        known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(REPOSITORY) not in known:
            os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, known)])
        self._context = multiprocessing.get_context("forkserver")

    def warm(self) -> None:
        """Start the server now, which imports in the background; one that runs stays as it is."""
        from multiprocessing import forkserver

        self._context.set_forkserver_preload(self._preload)
        with _signals_ignored(), _folder_not_searched():
            forkserver.ensure_running()

    def run(
        self,
        cell: RunConfig,
        folder: Path,
        *,
        entry: RankEntry | None = None,
        listener: Listener = SILENT,
        known: frozenset[str] = frozenset(),
    ) -> list[RankEnd]:
        """Run a cell's ranks to their ends, by the deadline at the latest; none is left when it returns."""
        self.warm()
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob("rank_*.json"):
            leftover.unlink()
        deadline = time.monotonic() + cell.measure.timeout_s
        receiver, sender = self._context.Pipe(duplex=False)
        with tempfile.TemporaryDirectory(prefix="ulysses-ring-bench-") as scratch:
            jobs = [
                (cell, rank, folder, Path(scratch) / "store", known)
                for rank in range(cell.cluster.world_size)
            ]
            ranks = [self._context.Process(target=_enter, args=(job, sender, entry)) for job in jobs]
            watch = Watch(ranks, folder, Path(scratch), _hang_watch(cell))
            try:
                for process in ranks:
                    process.start()
                sender.close()
                watch.follow(receiver, deadline, listener)
            finally:
                for process in ranks:
                    _kill(process)
                receiver.close()
            return watch.ends(time.monotonic())


@contextmanager
def _signals_ignored() -> Iterator[None]:
    """What is started here never answers a terminal's signals: those are the launcher's to answer.

    The server would ignore Ctrl-C only once it serves, and a lost connection would end it and with it all
    ranks, before the launcher can say what ended them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may say so
        return
    before = {each: signal.signal(each, signal.SIG_IGN) for each in (signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def refuse_no_docstrings() -> None:
    """Raises ConfigError where Python drops docstrings, which transformers reads when it is imported."""
    if sys.flags.optimize > 1:
        raise ConfigError(
            f"PYTHONOPTIMIZE={sys.flags.optimize}: drops the docstrings that transformers reads; unset it, or"
            " write PYTHONOPTIMIZE=1"
        )


@contextmanager
def _folder_not_searched() -> Iterator[None]:
    """What is started finds no modules in the folder it starts in: somebody's own `bench/` may be there."""
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


@dataclass(frozen=True, slots=True)
class Exit:
    """The end of a rank that was not stopped."""

    code: int
    at_s: float
    """By the monotonic clock."""


def _enter(job_fields: tuple[Any, ...], sender: Connection, entry: RankEntry | None) -> None:
    """The first function of a rank: everything it needs is imported in the server already."""
    die_with_launcher()
    try:
        from bench.cell.worker import RankJob, live, run_cell
    except BaseException as error:  # noqa: BLE001  a broken package may raise anything, SystemExit too
        _cannot_start(job_fields[1], job_fields[2], error)
    job = RankJob(*job_fields)

    def tell(message: Stage | RankFailed) -> None:
        if job.rank == 0 or isinstance(message, RankFailed):
            sender.send(message)

    live(job, tell, entry or run_cell)


def _cannot_start(rank: int, folder: Path, error: BaseException) -> NoReturn:
    """End a rank that cannot even import its own code, with a failure as `live` would write it."""
    failure: dict[str, Any] = {
        "phase": "import",
        "kind": type(error).__name__,
        "message": str(error),
        "traceback": "".join(traceback.format_exception(error)),
        "failed_at_s": time.monotonic(),
    }
    _log(folder, rank).write_text(failure["traceback"])
    _failure(folder, rank).write_text(json.dumps(failure))
    os._exit(1)


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
            new += [rank for rank in ended if not _report(self._folder, rank).exists()]
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
            LiveRank(rank, process.pid, _log(self._folder, rank), answers=self._place(rank) is not None)
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
        report, failure = _take(_report(self._folder, rank)), _take(_failure(self._folder, rank))
        failed_at_s = left.at_s if left is not None else None
        if failure is not None:
            failed_at_s = failure.pop("failed_at_s")
        return RankEnd(
            rank,
            None if left is None else left.code,
            report,
            failure,
            _tail(_log(self._folder, rank)),
            None if failed_at_s is None else over_s - failed_at_s,
            place,
            self._blame.what if self._blame is not None and self._blame.rank == rank else None,
        )


def _hang_watch(cell: RunConfig) -> HangWatch:
    return HangWatch(cell.measure.silence_s, waiting_spins=cell.cluster.device == "cuda")


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
    failure = _read(_failure(folder, rank))
    return LOST_PEER_GRACE_S if failure is not None and lost_a_peer(failure) else GRACE_S


def _kill(process: BaseProcess) -> None:
    """End a rank and whatever it started; a rank leads its own process group."""
    if process.pid is None:
        return
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.log"


def _report(folder: Path, rank: int) -> Path:
    """What a rank writes when it has done everything; an exit code of 0 does not prove that."""
    return folder / f"rank_{rank}.report.json"


def _failure(folder: Path, rank: int) -> Path:
    """What a rank writes when an error ended it."""
    return folder / f"rank_{rank}.failure.json"


def _read(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def _take(path: Path) -> dict[str, Any] | None:
    """Read a rank's file and remove it: its content goes into the record."""
    content = _read(path)
    path.unlink(missing_ok=True)
    return content


def _tail(path: Path) -> str:
    if not path.exists():
        return ""
    return path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace")
