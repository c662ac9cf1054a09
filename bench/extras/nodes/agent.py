"""A node's agent: starts and follows ranks on its machine for a launcher on another."""

from __future__ import annotations

import socket
import tempfile
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING

from bench.extras.nodes.interface import family_of
from bench.extras.nodes.link import (
    Answered,
    Ended,
    Leave,
    Message,
    MessageLink,
    RankEvents,
    RankFile,
    Start,
    StateRequest,
    Stop,
)
from bench.run.node.local import LocalNode, LocalRanks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore

LOOK_S = 1.0
"""How often ranks are looked at while nothing happens to them."""
LOG_BYTES = 1 << 20
"""Of a log's end that is sent."""
FILE_BYTES = 32 << 20
"""Of a file that is sent; a larger one stays behind."""


def keep_store(address: str) -> TCPStore:
    """A store for the ranks of several nodes while it is held; listens at this address and nowhere else."""
    from torch._C._distributed_c10d import TCPStore

    listener = socket.create_server((address, 0), family=family_of(address))
    port = listener.getsockname()[1]
    return TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


class Agent:
    """Does what the launcher says until that is gone."""

    ranks: LocalRanks | None = None
    """Those that it runs now."""

    def __init__(self, link: MessageLink, node: LocalNode) -> None:
        self._link = link
        self._node = node
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def serve(self) -> None:
        """Returns when the launcher says so; raises LinkLostError when it is gone. No rank is left then."""
        try:
            while True:
                ranks = [] if self.ranks is None else self.ranks.waits()
                if self._link.connection in wait([self._link.connection, *ranks], timeout=LOOK_S):
                    message: Message = self._link.receive()
                    if isinstance(message, Leave):
                        return
                    self._obey(message)
                self._tell_news()
        finally:
            self._end_ranks()

    def _obey(self, message: Message) -> None:
        match message:
            case Start():
                self._folder = tempfile.TemporaryDirectory(prefix="ulysses-ring-bench-")
                self.ranks = self._node.start(message.job, Path(self._folder.name))
            case StateRequest() if self.ranks is not None:
                self._link.send(Answered(doing=self.ranks.ask(message.wait_s)))
            case Stop():
                self._stop()

    def _tell_news(self) -> None:
        if self.ranks is not None:
            news, progress = self.ranks.news(), self.ranks.look()
            if news or progress is not None:
                self._link.send(RankEvents(news=news, progress=progress))

    def _stop(self) -> None:
        if self.ranks is not None and self._folder is not None:
            self.ranks.stop()
            ends = self.ranks.ends()
            for path in sorted(filter(Path.is_file, Path(self._folder.name).iterdir())):
                self._send_file(path)
            self._link.send(Ended(ends=ends))
        self._end_ranks()

    def _send_file(self, path: Path) -> None:
        """A rank's log, or its end; another file that is not too large."""
        content = path.read_bytes()
        if path.suffix == ".log":
            content = content[-LOG_BYTES:]
        if len(content) <= FILE_BYTES:
            self._link.send(RankFile(name=path.name, content=content))

    def _end_ranks(self) -> None:
        """End them, and remove what they left."""
        if self.ranks is not None:
            self.ranks.stop()
            self.ranks = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
