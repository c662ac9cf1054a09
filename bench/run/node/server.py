"""The server that ranks are forked from, which has imported everything already.

The standard library's fork server, not torch elastic's agent: its ranks may leave by `os._exit` (see
`worker`), and a rank's end wakes the launcher at once instead of at the next poll.
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
from bench.run.node.ranks import Failing, RankFailure

PRELOAD = "bench.run.node.preload"
SAFE_PATH = "PYTHONSAFEPATH"


class ForkServer:
    """Makes processes that have imported what ranks need. Imports no torch itself and never touches CUDA."""

    def __init__(self) -> None:
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

        self._context.set_forkserver_preload([PRELOAD])
        with _signals_ignored(), _folder_not_searched():
            forkserver.ensure_running()

    def process(self, target: Callable[..., object], *arguments: Any) -> BaseProcess:
        """A process that will call this and end with the server; not started yet."""
        return _Process(target=target, args=arguments)


class _Process(ForkServerProcess):
    """A process of the fork server that knows nothing of the command's main module."""

    def start(self) -> None:
        with _main_module_left_out():
            super().start()


@contextmanager
def _main_module_left_out() -> Iterator[None]:
    """Every process would import it first, Hydra and all: 0.2 s. Nothing that it calls is in there."""
    before = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = before


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


def enter_rank(job: RankJob, sender: Connection, entry: RankEntry | None) -> None:
    """Begin as a rank that runs `entry`, by default the cell's passes, and reports through `sender`.

    Everything that it needs is imported in the server already.
    """
    die_with_launcher()
    try:
        from bench.run.node.worker import live, run_cell
    except BaseException as error:  # noqa: BLE001  a broken package may raise anything, SystemExit too
        _cannot_start(job, error)

    def tell(message: RankStage | Failing) -> None:
        if job.rank == job.cell.running_ranks[0] or isinstance(message, Failing):
            sender.send(message)

    live(job, tell, entry or run_cell)


def _cannot_start(job: RankJob, error: BaseException) -> NoReturn:
    """End a rank that cannot even import its own code, with a failure as `live` would write it."""
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
