"""Time for a rank's last word: whoever started the ranks ends the others as soon as one is gone."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def sigterm_held_back() -> Iterator[None]:
    """Let SIGTERM wait until the context is left. torchrun sends it at once, and SIGKILL 30 s later.

    Only the main thread can hear signals; elsewhere nothing waits.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)
        if heard:
            signal.raise_signal(signal.SIGTERM)
