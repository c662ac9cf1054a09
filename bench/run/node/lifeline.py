"""What ends a rank when the process that started it is gone, however that ended."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
from multiprocessing import forkserver
from typing import Any

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends: the fork server, or torchrun. Linux only."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def die_with_launcher() -> None:
    """Have a process of the fork server end once nobody can ask that server for another process.

    It goes by a pipe whose other end each of its processes is handed to ask it by. A rank never does, and
    would keep it alive, and so itself, when the launcher is killed. One whose launcher is gone already ends
    here.
    """
    die_with_parent()
    server: Any = forkserver._forkserver  # there is no public way to let go of the pipe
    alive = getattr(server, "_forkserver_alive_fd", None)
    if alive is not None:
        os.close(alive)
        server._forkserver_alive_fd = None
    launcher = multiprocessing.parent_process()
    if launcher is not None and not launcher.is_alive():
        os._exit(1)
