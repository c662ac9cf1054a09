"""A machine with an agent as a node: what is asked of it goes over the link."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from bench.extras.nodes.link import (
    SILENT_S,
    Answered,
    Ended,
    Hello,
    LinkLostError,
    Message,
    MessageLink,
    RankEvents,
    RankFile,
    Start,
    StateRequest,
    Stop,
)
from bench.run.node.job import NodeJob, RankEntry
from bench.run.node.ranks import Lost, News, RankEnd
from bench.run.node.stacks import Doing

Reply = TypeVar("Reply", Answered, Ended)

ANSWER_S = 30.0
"""For an answer that takes an agent some work."""
POLL_S = 0.05


class RemoteNode:
    """Starts ranks on the machine of an agent."""

    def __init__(self, link: MessageLink, hello: Hello) -> None:
        self.hello = hello
        self.store = (hello.address, hello.store_port)
        self.lost: str | None = None
        """Why it is out of reach; None while it is not."""
        self._link = link

    @property
    def description(self) -> Mapping[str, Any]:
        hello = self.hello
        return {"host": hello.host, "address": hello.address, **hello.environment}

    @property
    def connection(self) -> Connection:
        return self._link.connection

    def warm(self) -> None:
        """Nothing: an agent says hello once it is."""

    def start(self, job: NodeJob, folder: Path, entry: RankEntry | None = None) -> RemoteRanks:
        assert entry is None  # code goes over no link: who runs another entry has no other nodes
        folder.mkdir(parents=True, exist_ok=True)
        self.tell(Start(job=job))
        return RemoteRanks(self, job, folder)

    def tell(self, message: Message) -> None:
        """Send, where somebody is there to take it."""
        if self.lost is None:
            try:
                self._link.send(message)
            except LinkLostError as error:
                self.lose(str(error))

    def messages(self) -> list[Message]:
        """What has come; does not wait."""
        found = []
        try:
            while self.lost is None and self._link.has_message():
                found.append(self._link.receive())
        except LinkLostError as error:
            self.lose(str(error))
        return found

    def lose(self, why: str) -> None:
        """Close the link to the node; `why` is kept as the reason."""
        if self.lost is None:
            self.lost = why
            self._link.close()


class RemoteRanks:
    """Ranks of one cell on the machine of an agent."""

    def __init__(self, node: RemoteNode, job: NodeJob, folder: Path) -> None:
        self.ranks = job.ranks
        self._node = node
        self._folder = folder
        self._news: list[News] = []
        self._progress: int | None = None
        """What was told and not looked at."""
        self._has_told_loss = False

    def waits(self) -> list[Connection | int]:
        return [] if self._node.lost is not None else [self._node.connection]

    def news(self) -> list[News]:
        self._take_in()
        found, self._news = self._news, []
        if self._node.lost is not None and not self._has_told_loss:
            self._has_told_loss = True
            found.append(Lost(self._node.lost))
        return found

    def look(self) -> int | None:
        progress, self._progress = self._progress, None
        return progress

    def ask(self, wait_s: float) -> Mapping[int, Doing]:
        self._node.tell(StateRequest(wait_s=wait_s))
        found = self._wait_for(Answered, wait_s + SILENT_S)
        return {} if found is None else found.doing

    def stop(self) -> None:
        self._node.tell(Stop())

    def ends(self) -> list[RankEnd]:
        """How each rank ended; of a node that is lost, that it is."""
        host, found = self._node.hello.host, self._wait_for(Ended, ANSWER_S)
        if found is not None:
            return [replace(end, node=host) for end in found.ends]
        why = self._node.lost or "did not say how its ranks ended"
        self._node.lose(why)  # or what it says too late would be taken for another cell's
        return [RankEnd.of_lost_node(rank, why, host) for rank in self.ranks]

    def _take_in(self) -> list[Message]:
        """Keep the news and the files that have come; the other messages."""
        others = []
        for message in self._node.messages():
            match message:
                case RankEvents():
                    self._news += message.news
                    self._progress = message.progress or self._progress
                case RankFile():
                    self._keep(message)
                case _:
                    others.append(message)
        return others

    def _wait_for(self, kind: type[Reply], within_s: float) -> Reply | None:
        """The first message of a kind; None where none comes."""
        until_s = time.monotonic() + within_s
        while True:
            for message in self._take_in():
                if isinstance(message, kind):
                    return message
            if self._node.lost is not None or time.monotonic() > until_s:
                return None
            time.sleep(POLL_S)

    def _keep(self, file: RankFile) -> None:
        """Put a rank's file into the cell's folder, under a plain name."""
        name = Path(file.name).name
        if name == file.name and name.startswith("rank_"):
            (self._folder / name).write_bytes(file.content)
