"""Agent of a node, which starts and follows ranks on its machine for a launcher on another machine."""

from __future__ import annotations

import socket
import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from bench.extras.nodes.interface import family_of
from bench.extras.nodes.link import (
    ActivityReport,
    ActivityRequest,
    Ended,
    Leave,
    Message,
    MessageLink,
    RankEvents,
    RankFile,
    Start,
    Stop,
)
from bench.run.node.local import LocalNode, LocalRanks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOK_S = 1.0
"""Seconds after which the progress of ranks is counted although no event has come."""
LOG_BYTES = 1 << 20
"""Bytes of a log's end that are sent to the launcher."""
FILE_BYTES = 32 << 20
"""Largest file that is sent to the launcher, in bytes; a larger one is deleted."""


def create_store(address: str) -> TCPStore:
    """Return a torch store through which the ranks of several nodes can connect.

    It listens at this address only, and serves as long as the returned object lives.
    """
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((address, 0), family=family_of(address))
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class Agent:
    """Executes the messages of a launcher until the connection closes."""

    ranks: LocalRanks | None = None
    """Ranks that run now; None between two cells."""

    def __init__(self, link: MessageLink, node: LocalNode) -> None:
        self._link = link
        self._node = node
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def serve(self) -> None:
        """Execute messages until the launcher ends the sweep. No rank runs when this returns or raises.

        Raises:
            LinkLostError: The launcher has ended or cannot be reached.
        """
        try:
            while True:
                ranks = [] if self.ranks is None else self.ranks.waitables()
                if self._link.connection in wait([self._link.connection, *ranks], timeout=LOOK_S):
                    message: Message = self._link.receive()
                    if isinstance(message, Leave):
                        return
                    self._execute(message)
                self._send_events()
        finally:
            self._end_ranks()

    def _execute(self, message: Message) -> None:
        match message:
            case Start():
                self._folder = tempfile.TemporaryDirectory(prefix="ulysses-ring-bench-")
                self.ranks = self._node.start(message.job, Path(self._folder.name))
            case ActivityRequest() if self.ranks is not None:
                self._link.send(ActivityReport(activities=self.ranks.ask_for_activity(message.wait_s)))
            case Stop():
                self._stop()

    def _send_events(self) -> None:
        if self.ranks is not None:
            events, progress = self.ranks.take_events(), self.ranks.count_progress()
            if events or progress is not None:
                self._link.send(RankEvents(events=events, progress=progress))

    def _stop(self) -> None:
        if self.ranks is not None and self._folder is not None:
            self.ranks.stop()
            ends = self.ranks.ends()
            for path in sorted(filter(Path.is_file, Path(self._folder.name).iterdir())):
                self._send_file(path)
            self._link.send(Ended(ends=ends))
        self._end_ranks()

    def _send_file(self, path: Path) -> None:
        """Send the end of a log, or another file that is not too large."""
        content = path.read_bytes()
        if path.suffix == ".log":
            content = content[-LOG_BYTES:]
        if len(content) <= FILE_BYTES:
            self._link.send(RankFile(name=path.name, content=content))

    def _end_ranks(self) -> None:
        """End the ranks and delete their files."""
        if self.ranks is not None:
            self.ranks.stop()
            self.ranks = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
