"""A node's agent: starts and follows ranks on its machine for a launcher on another."""

from __future__ import annotations

import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path

from bench.node.local import LocalNode
from bench.node.meeting import MeetingPlace
from bench.node.ranks import Failing, Left, Look, NodeRanks
from bench.nodes.link import Link, LinkLostError
from bench.nodes.messages import (
    Answered,
    Ask,
    Beat,
    Began,
    CannotStart,
    Ended,
    Failed,
    Gone,
    HostStore,
    Kept,
    Leave,
    Message,
    Seen,
    Start,
    Stop,
    StoreAt,
)
from bench.ranks.log import Stage

BEAT_S = 1.0
"""How often each side says that it is there."""
LAUNCHER_LOST_S = 20.0
"""An agent that has heard nothing for so long ends its ranks and leaves."""
LOG_BYTES = 1 << 20
"""Of a log's end that is sent."""
FILE_BYTES = 32 << 20
"""Of a file that is sent; a larger one stays behind."""


class Agent:
    """Does what the launcher says until that is gone."""

    ranks: NodeRanks | None = None
    """Those that it runs now."""

    def __init__(self, link: Link, node: LocalNode) -> None:
        self._link = link
        self._node = node
        self._run = -1
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._store: MeetingPlace | None = None
        self._is_over = False
        self._leave_by_s: float | None = None

    def serve(self) -> None:
        """Returns when the launcher says so; raises LinkLostError when it is gone. No rank is left then."""
        heard_s = beat_s = time.monotonic()
        try:
            while not self._is_over:
                ready = wait(self._waits(), timeout=BEAT_S)
                now_s = time.monotonic()
                if self._link.connection in ready:
                    self._obey(self._link.receive())
                    heard_s = time.monotonic()
                elif now_s - heard_s > LAUNCHER_LOST_S:
                    raise LinkLostError(f"nothing heard from the launcher for {LAUNCHER_LOST_S:.0f} s")
                if self._leave_by_s is not None and now_s > self._leave_by_s:
                    raise LinkLostError("asked to end by SIGTERM")
                self._tell_news()
                # One that runs nothing is not listened to, and what it says would fill the link.
                if self.ranks is not None and time.monotonic() - beat_s >= BEAT_S:
                    self._link.send(Beat())
                    beat_s = time.monotonic()
        finally:
            self._end_ranks()
            if self._store is not None:
                self._store.stop()

    def leave_within(self, seconds: float) -> None:
        """Go on for so long, in which the launcher may end the sweep in its own way."""
        self._leave_by_s = time.monotonic() + seconds

    def _waits(self) -> list[Connection | int]:
        ranks = [] if self.ranks is None else self.ranks.waits()
        return [self._link.connection, *ranks]

    def _obey(self, message: Message) -> None:
        match message:
            case Start():
                self._start(message)
            case Stop():
                self._stop()
            case Ask():
                self._ask(message)
            case HostStore():
                self._host_store()
            case Leave():
                self._is_over = True
            case _:
                """A beat: it was heard."""

    def _tell_news(self) -> None:
        if self.ranks is None:
            return
        for each in self.ranks.news():
            match each:
                case Stage():
                    self._link.send(Began(run=self._run, stage=each))
                case Failing():
                    self._link.send(Failed(run=self._run, failing=each))
                case Left():
                    self._link.send(Gone(run=self._run, left=each))
        look = self.ranks.look()
        if look is not None and look != Look():
            self._link.send(Seen(run=self._run, look=look))

    def _start(self, message: Start) -> None:
        self._end_ranks()
        self._run = message.run
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="ulysses-ring-bench-")
            self.ranks = self._node.start(message.job, Path(self._folder.name))
        except OSError as error:
            self._link.send(CannotStart(run=self._run, why=f"could not start ranks: {error}"))

    def _ask(self, message: Ask) -> None:
        if self.ranks is not None:
            self._link.send(Answered(run=self._run, answers=self.ranks.ask(message.wait_s)))

    def _stop(self) -> None:
        if self.ranks is not None and self._folder is not None:
            self.ranks.stop()
            ends = self.ranks.ends()
            for path in sorted(filter(Path.is_file, Path(self._folder.name).iterdir())):
                self._send_file(path)
            self._link.send(Ended(run=self._run, ends=ends))
        self._end_ranks()

    def _send_file(self, path: Path) -> None:
        """A rank's log, or its end; another file that is not too large."""
        content = path.read_bytes()
        if path.suffix == ".log":
            content = content[-LOG_BYTES:]
        if len(content) <= FILE_BYTES:
            self._link.send(Kept(run=self._run, name=path.name, content=content))

    def _host_store(self) -> None:
        if self._store is None:
            self._store = self._node.meeting_place(self._link.address)
        self._link.send(StoreAt(port=self._store.port()))

    def _end_ranks(self) -> None:
        """End them, and remove what they left."""
        if self.ranks is not None:
            self.ranks.stop()
            self.ranks = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
