"""Signals that end a sweep early: each is an interruption that keeps what is done, named as what it was."""

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
"""What ends a sweep, and what the record calls it: a scheduler's signal, and that of a lost connection."""
UNWIND_S = 5.0
"""For so long a signal is taken for a repetition of the one before, whose ranks are still being ended."""


class Interrupts:
    """Raises KeyboardInterrupt with the name of a signal; never while a sweep closes after one."""

    def __init__(self) -> None:
        self._raised_s: float | None = None
        self._name = ""
        self._handled: list[signal.Signals] = []

    def install(self) -> None:
        """Handle all SIGNALS but those that are ignored: nohup does so with SIGHUP, a shell with SIGINT."""
        for caught in SIGNALS:
            if signal.getsignal(caught) is not signal.SIG_IGN:
                signal.signal(caught, self._handle)
                self._handled.append(caught)

    @classmethod
    def installed(cls) -> Interrupts:
        """Return the object that handles signals in this process; a new one where there is none."""
        handlers = (getattr(signal.getsignal(caught), "__self__", None) for caught in SIGNALS)
        return next((handler for handler in handlers if isinstance(handler, cls)), None) or cls()

    def begin_to_close(self) -> None:
        """From now on, to the very end, signals change nothing: what is done is being written down."""
        for caught in self._handled:
            signal.signal(caught, signal.SIG_IGN)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Let signals interrupt this, also while the sweep closes."""
        before, self._raised_s = {each: signal.getsignal(each) for each in self._handled}, None
        for caught in before:
            signal.signal(caught, self._handle)
        try:
            yield
        finally:
            for caught, handler in before.items():
                signal.signal(caught, handler)

    def raise_swallowed(self) -> None:
        """Raise again what came where Python cannot raise anything, as in a destructor."""
        if self._raised_s is not None:
            raise KeyboardInterrupt(self._name)

    def _handle(self, number: int, _: Any) -> None:
        caught = signal.Signals(number)
        if caught is signal.SIGHUP:
            _write_to_nowhere()
        now_s = time.monotonic()
        is_repeated = self._raised_s is not None and now_s - self._raised_s < UNWIND_S
        if not is_repeated:
            self._raised_s, self._name = now_s, SIGNALS[caught]
            raise KeyboardInterrupt(self._name)


def _write_to_nowhere() -> None:
    """A terminal that is gone refuses every byte, which would end the sweep before its report."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.__stdout__, sys.__stderr__):
        with suppress(OSError, ValueError, AttributeError):
            descriptor = stream.fileno()  # type: ignore[union-attr]
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
