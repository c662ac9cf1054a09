"""Node on another machine, which runs ranks through its agent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from bench.extras.nodes.link import (
    SILENT_S,
    ActivityReport,
    ActivityRequest,
    Ended,
    Hello,
    LinkLostError,
    Message,
    MessageLink,
    RankEvents,
    RankFile,
    Start,
    Stop,
)
from bench.run.node.job import NodeJob, RankEntry
from bench.run.node.ranks import NodeEvent, NodeLost, RankEnd
from bench.run.node.stacks import RankActivity

Reply = TypeVar("Reply", ActivityReport, Ended)

ANSWER_S = 30.0
"""Longest time to wait until an agent has ended its ranks and reports their ends, in seconds."""
POLL_S = 0.05
"""Seconds between two looks for an answer."""


class RemoteNode:
    """Starts ranks on the machine of an agent."""

    def __init__(self, link: MessageLink, hello: Hello) -> None:
        self.hello = hello
        self.store = (hello.address, hello.store_port)
        self.lost_reason: str | None = None
        """Reason why the node is out of reach; None while it is within reach."""
        self._link = link

    @property
    def description(self) -> Mapping[str, Any]:
        hello = self.hello
        return {"host": hello.host, "address": hello.address, **hello.environment}

    @property
    def connection(self) -> Connection:
        return self._link.connection

    def warm(self) -> None:
        """Do nothing, as an agent imports everything before it connects."""

    def start(self, job: NodeJob, folder: Path, entry: RankEntry | None = None) -> RemoteRanks:
        assert (
            entry is None
        )  # functions cannot be sent to an agent; only single-node cells have another entry
        folder.mkdir(parents=True, exist_ok=True)
        self.send(Start(job=job))
        return RemoteRanks(self, job, folder)

    def send(self, message: Message) -> None:
        """Send a message to the agent, unless the node is lost."""
        if self.lost_reason is None:
            try:
                self._link.send(message)
            except LinkLostError as error:
                self.lose(str(error))

    def take_messages(self) -> list[Message]:
        """Return the messages that have arrived, without waiting."""
        messages = []
        try:
            while self.lost_reason is None and self._link.has_message():
                messages.append(self._link.receive())
        except LinkLostError as error:
            self.lose(str(error))
        return messages

    def lose(self, reason: str) -> None:
        """Close the link to the node and store the reason."""
        if self.lost_reason is None:
            self.lost_reason = reason
            self._link.close()


class RemoteRanks:
    """Ranks of one cell on the machine of an agent."""

    def __init__(self, node: RemoteNode, job: NodeJob, folder: Path) -> None:
        self.ranks = job.ranks
        self._node = node
        self._folder = folder
        self._events: list[NodeEvent] = []
        self._progress: int | None = None
        """Newest progress that was received and not yet returned."""
        self._has_reported_loss = False

    def waitables(self) -> list[Connection | int]:
        return [] if self._node.lost_reason is not None else [self._node.connection]

    def take_events(self) -> list[NodeEvent]:
        self._receive()
        events, self._events = self._events, []
        if self._node.lost_reason is not None and not self._has_reported_loss:
            self._has_reported_loss = True
            events.append(NodeLost(self._node.lost_reason))
        return events

    def count_progress(self) -> int | None:
        progress, self._progress = self._progress, None
        return progress

    def ask_for_activity(self, wait_s: float) -> Mapping[int, RankActivity]:
        self._node.send(ActivityRequest(wait_s=wait_s))
        answer = self._wait_for(ActivityReport, wait_s + SILENT_S)
        return {} if answer is None else answer.activities

    def stop(self) -> None:
        self._node.send(Stop())

    def ends(self) -> list[RankEnd]:
        """Return the end of every rank; on a lost node an end has only the reason why the node is lost."""
        host, answer = self._node.hello.host, self._wait_for(Ended, ANSWER_S)
        if answer is not None:
            return [replace(end, node=host) for end in answer.ends]
        reason = (
            self._node.lost_reason or f"its agent did not report the ends of its ranks within {ANSWER_S:g} s"
        )
        self._node.lose(reason)  # a late answer would be taken for the answer about the next cell
        return [RankEnd.on_lost_node(rank, reason, host) for rank in self.ranks]

    def _receive(self) -> list[Message]:
        """Store the events and files that have arrived; return the other messages."""
        others = []
        for message in self._node.take_messages():
            match message:
                case RankEvents():
                    self._events += message.events
                    self._progress = message.progress or self._progress
                case RankFile():
                    self._write_file(message)
                case _:
                    others.append(message)
        return others

    def _wait_for(self, kind: type[Reply], within_s: float) -> Reply | None:
        """Return the first message of this type, or None if none arrives within `within_s` seconds."""
        until_s = time.monotonic() + within_s
        while True:
            for message in self._receive():
                if isinstance(message, kind):
                    return message
            if self._node.lost_reason is not None or time.monotonic() > until_s:
                return None
            time.sleep(POLL_S)

    def _write_file(self, file: RankFile) -> None:
        """Write a rank's file into the cell's folder, if its name is that of such a file and no path."""
        name = Path(file.name).name
        if name == file.name and name.startswith("rank_"):
            (self._folder / name).write_bytes(file.content)
