"""A machine with an agent as a node: what is asked of it goes over the link."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.config import ConfigError
from bench.node.end import RankEnd
from bench.node.job import NodeJob
from bench.node.ranks import Answers, Look, Lost, News
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
    Hello,
    HostStore,
    Kept,
    Message,
    Seen,
    Start,
    Stop,
    StoreAt,
)

if TYPE_CHECKING:
    from bench.node.worker import RankEntry

SILENT_S = 5.0
"""A node of which nothing was heard for so long is lost: while it has ranks, its agent sends every second."""
ANSWER_S = 30.0
"""For an answer that takes an agent some work."""
POLL_S = 0.05


class RemoteNode:
    """Starts ranks on the machine of an agent."""

    def __init__(self, link: Link, hello: Hello) -> None:
        self.hello = hello
        self.lost: str | None = None
        """Why it is out of reach; None while it is not."""
        self._link = link
        self._heard_s = time.monotonic()
        self._runs = itertools.count()
        self._store: tuple[str, int] | None = None

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
        if entry is not None:
            raise ConfigError("cluster.nodes: this command runs its ranks on one machine; leave out cluster")
        folder.mkdir(parents=True, exist_ok=True)
        run = next(self._runs)
        self._heard_s = time.monotonic()
        self.tell(Start(run=run, job=replace(job, shared_folder=None)))
        return RemoteRanks(self, job, folder, run)

    def store(self) -> tuple[str, int]:
        if self._store is None:
            self._heard_s = time.monotonic()
            self.tell(HostStore())
            found = self.wait_for(lambda message: isinstance(message, StoreAt), ANSWER_S)
            if found is None:
                self._lose("does not answer")
            self._store = (self.hello.address, 0 if found is None else found.port)
        return self._store

    def tell(self, message: Message) -> None:
        """Send, where somebody is there to take it."""
        if self.lost is None:
            try:
                self._link.send(message)
            except LinkLostError as error:
                self._lose(str(error))

    def beat(self) -> None:
        """Say that the launcher is there; whether the node is, reading tells."""
        with suppress(LinkLostError):
            self._link.send(Beat())

    def messages(self, patience_s: float = SILENT_S) -> list[Message]:
        """What has come; does not wait. A node that is silent for longer than `patience_s` is lost."""
        found = []
        try:
            while self.lost is None and self._link.has_message():
                found.append(self._link.receive())
                self._heard_s = time.monotonic()
        except LinkLostError as error:
            self._lose(str(error))
        if time.monotonic() - self._heard_s > patience_s:
            self._lose(f"nothing heard for {patience_s:.0f} s")
        return found

    def wait_for(self, is_it: Callable[[Message], bool], within_s: float) -> Any:
        """The first such message, others before it being dropped; None where none comes."""
        until_s = time.monotonic() + within_s
        while self.lost is None and time.monotonic() < until_s:
            for each in self.messages(within_s):
                if is_it(each):
                    return each
            time.sleep(POLL_S)
        return None

    def _lose(self, why: str) -> None:
        if self.lost is None:
            self.lost = why
            self._link.close()


class RemoteRanks:
    """Ranks of one cell on the machine of an agent."""

    def __init__(self, node: RemoteNode, job: NodeJob, folder: Path, run: int) -> None:
        self.ranks = job.ranks
        self._node = node
        self._folder = folder
        self._run = run
        self._look: Look | None = None
        self._early: list[Message] = []
        """What came while something else was waited for."""
        self._ends: list[RankEnd] | None = None
        self._why: str | None = None
        self._has_told = False

    def waits(self) -> list[Connection | int]:
        return [] if self._node.lost is not None else [self._node.connection]

    def news(self) -> list[News]:
        found: list[News] = []
        early, self._early = self._early, []
        for message in (*early, *self._messages()):
            match message:
                case Began():
                    found.append(message.stage)
                case Failed():
                    found.append(message.failing)
                case Gone():
                    found.append(message.left)
                case Seen():
                    self._look = message.look
                case CannotStart():
                    self._why = message.why
        self._why = self._why or self._node.lost
        if self._why is not None and not self._has_told:
            self._has_told = True
            found.append(Lost(self._why))
        return found

    def look(self) -> Look | None:
        look, self._look = self._look, None
        return look

    def ask(self, wait_s: float) -> Answers:
        self._node.tell(Ask(wait_s=wait_s))
        found = self._wait_for(Answered, wait_s + SILENT_S)
        return Answers() if found is None else found.answers

    def stop(self) -> None:
        self._node.tell(Stop())

    def ends(self) -> list[RankEnd]:
        """How each rank ended; of a node that is lost, that it is."""
        host = self._node.hello.host
        found = None if self._why is not None else self._wait_for(Ended, ANSWER_S)
        if found is not None:
            return [replace(end, node=host) for end in found.ends]
        why = self._why or self._node.lost or "did not say how its ranks ended"
        return [RankEnd.of_lost_node(rank, why, host) for rank in self.ranks]

    def _messages(self, patience_s: float = SILENT_S) -> list[Message]:
        """What has come of this run; files are put where they belong."""
        found = []
        for message in self._node.messages(patience_s):
            if getattr(message, "run", None) != self._run:
                continue
            if isinstance(message, Kept):
                self._keep(message)
            else:
                found.append(message)
        return found

    def _wait_for(self, kind: type[Any], within_s: float) -> Any:
        """The first message of a kind; what comes before it is news for later. None where none comes."""
        until_s = time.monotonic() + within_s
        while True:
            came = self._messages(within_s)
            found = next((message for message in came if isinstance(message, kind)), None)
            self._early += [message for message in came if message is not found]
            if found is not None:
                return found
            if self._node.lost is not None or time.monotonic() > until_s:
                return None
            time.sleep(POLL_S)

    def _keep(self, file: Kept) -> None:
        """Put a rank's file into the cell's folder, under a plain name."""
        name = Path(file.name).name
        if name == file.name and name.startswith("rank_"):
            (self._folder / name).write_bytes(file.content)
