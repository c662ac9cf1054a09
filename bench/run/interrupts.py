"""Turn signals that end a sweep early into KeyboardInterrupt, so that finished records are kept."""

from __future__ import annotations

import os
import signal
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

SIGNALS: Mapping[signal.Signals, str] = {
    signal.SIGINT: "Ctrl-C",
    signal.SIGTERM: "SIGTERM",
    signal.SIGHUP: "SIGHUP",
}
"""Signals that end a sweep, with their names in records. Schedulers send SIGTERM, a lost terminal SIGHUP."""
UNWIND_S = 5.0
"""Seconds after a signal in which further ones are ignored, because the ranks are still being ended."""


class Interrupts:
    """Handler that raises KeyboardInterrupt with the name of a signal, until signals are ignored."""

    def __init__(self) -> None:
        self._raised_at_s: float | None = None
        self._name = ""
        self._handled: list[signal.Signals] = []

    def install(self) -> None:
        """Handle all SIGNALS except ignored ones: nohup ignores SIGHUP, a script's `&` ignores SIGINT."""
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._handle)
                self._handled.append(number)

    @classmethod
    def current(cls) -> Interrupts:
        """Return the object that handles signals in this process, or a new one without handlers."""
        handlers = (getattr(signal.getsignal(number), "__self__", None) for number in SIGNALS)
        return next((handler for handler in handlers if isinstance(handler, cls)), None) or cls()

    def ignore_signals(self) -> None:
        """Ignore signals from now on, so that records and report are written completely."""
        for number in self._handled:
            signal.signal(number, signal.SIG_IGN)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Handle signals again in this context, for example after `ignore_signals`."""
        previous = {number: signal.getsignal(number) for number in self._handled}
        self._raised_at_s = None
        for number in previous:
            signal.signal(number, self._handle)
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def raise_swallowed(self) -> None:
        """Raise KeyboardInterrupt again if Python has swallowed it, as it does in a destructor."""
        if self._raised_at_s is not None:
            raise KeyboardInterrupt(self._name)

    def _handle(self, number: int, _: Any) -> None:
        caught = signal.Signals(number)
        if caught is signal.SIGHUP:
            _redirect_terminal_to_devnull()
        now_s = time.monotonic()
        is_repeated = self._raised_at_s is not None and now_s - self._raised_at_s < UNWIND_S
        if not is_repeated:
            self._raised_at_s, self._name = now_s, SIGNALS[caught]
            raise KeyboardInterrupt(self._name)


def _redirect_terminal_to_devnull() -> None:
    """Send output to /dev/null if it goes to a terminal, which is closed after SIGHUP.

    Writing to a closed terminal raises an error, which would end the sweep before its report.
    """
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        with suppress(OSError, ValueError, AttributeError):
            descriptor = stream.fileno()  # type: ignore[union-attr]
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(devnull, descriptor)
    os.close(devnull)
