"""End a rank process when the process that started it has ended, for whatever reason."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from multiprocessing import forkserver
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Let Linux kill this process when its parent (the fork server or torchrun) ends. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_launcher() -> None:
    """Let the fork server, and with it this rank, end when the launcher ends.

    The fork server runs until all copies of a pipe's write end are closed. The launcher has one, and every
    process that the server forks inherits one. A rank closes its copy here, or the rank and the server would
    keep each other alive when the launcher is killed. If the launcher has ended already, this process exits.
    """
    die_with_parent()
    server: Any = forkserver._forkserver  # no public function closes the pipe
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
        server._forkserver_alive_fd = None
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)
