"""Fork server: the process that has imported torch and forks the rank processes.

It is the standard library's fork server and not torch elastic's agent, because ranks may then exit by
`os._exit` (see `worker`), and the end of a rank wakes the launcher at once instead of at the next poll.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, NoReturn

from msgspec import to_builtins

from bench.common.environment import REPOSITORY
from bench.ranks.log import RankStage
from bench.run.node.job import RankEntry, RankJob, failure_path, log_path
from bench.run.node.lifeline import die_with_launcher
from bench.run.node.ranks import RankFailed, RankFailure

PRELOAD = "bench.run.node.preload"
"""Module that the fork server imports before it forks the first rank."""
SAFE_PATH = "PYTHONSAFEPATH"


class ForkServer:
    """Creates processes in which the packages that ranks need are imported already.

    The process that has this object imports no torch and never touches CUDA.
    """

    def __init__(self) -> None:
        # The server inherits this environment when it starts, and keeps it.
        os.environ.setdefault("DS_LOG_LEVEL", "warning")
        # Importing DeepSpeed starts CUDA to find out whether there is a GPU, unless this variable names the
        # accelerator. `join_deepspeed` corrects the choice in ranks on a GPU.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        # No other library may start CUDA in the server either, or no rank that it forks could use a GPU. With
        # this variable torch asks NVML instead.
        os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
        # Packages read files, such as their own sources, that are UTF-8 whatever the locale is.
        os.environ["PYTHONUTF8"] = "1"
        # OpenMP warns about a value that is no number. None is needed: each rank sets its number of threads.
        if not os.environ.get("OMP_NUM_THREADS", "1").strip("0").isdigit():
            del os.environ["OMP_NUM_THREADS"]
        # The server finds modules by PYTHONPATH alone, and must not find another copy of this package.
        entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        if str(REPOSITORY) not in entries:
            os.environ["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, entries)])
        self._context = multiprocessing.get_context("forkserver")

    def warm(self) -> None:
        """Start the server if it does not run yet; it imports packages in the background."""
        from multiprocessing import forkserver

        self._context.set_forkserver_preload([PRELOAD])
        with _ignored_terminal_signals(), _safe_import_path():
            forkserver.ensure_running()

    def create_process(self, target: Callable[..., object], *arguments: Any) -> BaseProcess:
        """Return a process that will call `target` once it is started. It ends when the server ends."""
        return _ForkedProcess(target=target, args=arguments)


class _ForkedProcess(ForkServerProcess):
    """Process of the fork server that does not import the command's main module."""

    def start(self) -> None:
        with _without_main_module():
            super().start()


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Hide the command's main module from processes that start in this context.

    Each process would import it first, and Hydra with it, which takes 0.2 s and is not needed.
    """
    before = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before


@contextmanager
def _ignored_terminal_signals() -> Iterator[None]:
    """Let processes that start in this context ignore SIGINT and SIGHUP, which the launcher handles.

    The server ignores Ctrl-C by itself, but only once it serves. A lost terminal (SIGHUP) would end it, and
    with it all ranks, before the launcher could record why they ended.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _safe_import_path() -> Iterator[None]:
    """Let processes that start in this context import nothing from the current folder.

    The user may have another `bench/` there.
    """
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SAFE_PATH]
        else:
            os.environ[SAFE_PATH] = before


def enter_rank(job: RankJob, sender: Connection, entry: RankEntry | None) -> None:
    """Run a rank in this process, which the fork server has just forked; never returns.

    Args:
        job: The rank's part of a cell.
        sender: Pipe to the launcher, for stages of the first running rank and failures of any rank.
        entry: Function that the rank runs; by default the passes of the cell.
    """
    die_with_launcher()
    try:
        from bench.run.node.worker import run_cell, run_rank
    except BaseException as error:  # noqa: BLE001  a broken package may raise anything, SystemExit too
        _exit_with_import_error(job, error)

    def send(event: RankStage | RankFailed) -> None:
        if job.rank == job.cell.running_ranks[0] or isinstance(event, RankFailed):
            sender.send(event)

    run_rank(job, send, entry or run_cell)


def _exit_with_import_error(job: RankJob, error: BaseException) -> NoReturn:
    """Exit a rank that cannot import its code, with a log and a failure file as `worker` writes them."""
    failure = RankFailure(
        phase="import",
        kind=type(error).__name__,
        message=str(error),
        traceback="".join(traceback.format_exception(error)),
        failed_at_s=time.monotonic(),
    )
    log_path(job.folder, job.rank).write_text(failure.traceback)
    failure_path(job.folder, job.rank).write_text(json.dumps(to_builtins(failure)))
    os._exit(1)
