"""Link between a launcher and an agent: lines over the standard streams of the agent's process.

A line is a message or empty. Both sides send an empty line each BEAT_S, which shows that they run.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

BEAT_S = 1.0
"""Seconds between two empty lines."""


class Link:
    """Sends lines over one pipe and receives lines from another, without waiting, until it is lost."""

    def __init__(self, reads: int, writes: int, silent_s: float) -> None:
        """Take the file descriptors of the pipes from and to the other side, which become non-blocking.

        After `silent_s` seconds in which the other side sends nothing or takes no data, the link is lost.
        """
        for descriptor in (reads, writes):
            os.set_blocking(descriptor, False)
        self.reads, self._writes, self.silent_s = reads, writes, silent_s
        self.lost_reason: str | None = None
        """Reason why no line can be exchanged any more; None until then."""
        self._sending = threading.Lock()
        self.heard_s = time.monotonic()
        """Time of the last sign of the other side, on the monotonic clock."""
        self._parts = [b""]
        """Parts of the line that has not ended yet."""

    @property
    def unfinished_line(self) -> bytes:
        return b"".join(self._parts)

    def send(self, line: bytes) -> None:
        """Send a line, unless the link is lost; wait only while the other side takes data slowly."""
        rest, poll = memoryview(line), select.poll()
        with self._sending:
            poll.register(self._writes, select.POLLOUT)
            while rest and self.lost_reason is None:
                if not poll.poll(1000 * self.silent_s):
                    self.lost_reason = f"took no data for {self.silent_s:g} s"
                try:
                    rest = rest[os.write(self._writes, rest) :]
                except BlockingIOError:
                    continue
                except OSError:
                    self.lost_reason = "connection closed"

    def receive(self) -> list[bytes]:
        """Return the lines that have arrived and are not empty."""
        lines: list[bytes] = []
        content = None
        with suppress(BlockingIOError):
            while content := os.read(self.reads, 1 << 20):
                self.heard_s = time.monotonic()
                first, *others = content.split(b"\n")
                self._parts.append(first)
                if others:
                    lines += [self.unfinished_line, *others[:-1]]
                    self._parts = others[-1:]
        if content == b"":
            self.lost_reason = "connection closed"
        elif time.monotonic() - self.heard_s > self.silent_s:
            self.lost_reason = f"silent for {self.silent_s:g} s"
        return [line for line in lines if line.strip()]


@contextmanager
def beats(links: Sequence[Link], then: Callable[[], object] = lambda: None) -> Iterator[None]:
    """Send an empty line over every link each BEAT_S while the context is open, from another thread.

    That thread then calls `then`, each time.
    """
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            for link in links:
                link.send(b"\n")
            then()

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
