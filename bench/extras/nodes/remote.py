"""Node on another machine, whose ranks an agent runs. ssh, srun or another command starts the agent."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from bench.config import ConfigError
from bench.extras.nodes.link import Link
from bench.extras.nodes.protocol import (
    BEGINNING,
    END,
    AskForActivity,
    NodeReport,
    Report,
    Request,
    Start,
    Stop,
    decode,
    encode,
)
from bench.run.node.job import NodeJob, RankEntry
from bench.run.node.ranks import NodeEvent, NodeLost, RankEnd
from bench.run.node.stacks import RankActivity

START_S, SILENT_S = 60.0, 5.0
"""Seconds of silence until a node counts as lost: before its agent is ready, and afterwards."""
ANSWER_S = 60.0
"""Longest time to wait until an agent has ended its ranks and sent their files, in seconds."""
ACKNOWLEDGE_S = 0.005
"""Seconds between empty lines while an answer is expected. They carry TCP's acknowledgements: on srun's
connection the last part of an answer would otherwise take 40 ms (Nagle's algorithm)."""
ENDINGS = ("srun:", "Connection to ", "command terminated with exit code")
OUTPUT_BYTES, LINE_CHARACTERS = 4000, 300
"""Bytes at the end of an agent's output in which its last line is looked for, and the length it is cut to."""


class RemoteNode:
    """Node that starts ranks through its agent."""

    def __init__(self, host: str, start: Sequence[str], agent: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the agent of `host` by the words `start`, followed by the words `agent`.

        Raises:
            ConfigError: The command cannot be run.
        """
        self.host, self.command = host, shlex.join(start)
        self.store: tuple[str, int] | None = None
        self.description: Mapping[str, Any] | None = None
        """Host, address and environment of the node; None until its agent is ready."""
        self._damage: str | None = None
        self._output = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  it lives as long as the node
        """Standard error of the command, and text that was printed before the agent started."""
        try:
            # Without a terminal no command can ask for a password, and the launcher handles Ctrl-C.
            self._process = subprocess.Popen(  # noqa: S603  the user's command, no shell
                [*start, *agent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output,
                bufsize=0, env=env, start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ConfigError(f"node {host}: `{self.command}` cannot be run: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._pipes = self._process.stdout, self._process.stdin
        self.link = Link(self._process.stdout.fileno(), self._process.stdin.fileno(), START_S)

    def warm(self) -> None:
        """Do nothing, as an agent imports everything before it is ready."""

    def start(self, job: NodeJob, folder: Path, entry: RankEntry | None = None) -> RemoteRanks:
        assert entry is None  # functions cannot be sent; only single-node cells have another entry
        folder.mkdir(parents=True, exist_ok=True)
        self.send(Start(job))
        return RemoteRanks(self, job, folder)

    @property
    def lost_reason(self) -> str | None:
        """Reason why the node is out of reach, with what was printed last; None while it is within reach."""
        reason = self.link.lost_reason
        if reason is None or self._damage is not None:
            return self._damage  # without what was printed last, which may be the rest of a message
        return ": ".join(filter(None, (reason, self.last_line())))

    def send(self, request: Request) -> None:
        self.link.send(encode(request))

    def receive(self) -> list[NodeReport]:
        """Return the reports about ranks that have arrived, without waiting."""
        reports: list[NodeReport] = []
        for line in self.link.receive():
            begin = BEGINNING.search(line)  # a program may print in front of a message, without a line's end
            try:
                report: Report = decode(line[begin.start() :] if begin else line, Report)
            except ConfigError as error:
                self._output.write(line + b"\n")
                if begin or END.search(line):
                    self.link.lost_reason = self._damage = str(error)
                continue
            if isinstance(report, NodeReport):
                reports.append(report)
            else:
                self.store, self.link.silent_s = report.store, SILENT_S
                self.description = {"host": self.host, "address": report.store[0], **report.environment}
        return reports

    def last_line(self) -> str:
        """Return the last line that the agent or the command printed, or an empty one."""
        descriptor, prompt = self._output.fileno(), self.link.unfinished_line
        tail = os.pread(descriptor, OUTPUT_BYTES, max(0, os.fstat(descriptor).st_size - OUTPUT_BYTES))
        text = (tail if prompt.startswith(b"{") else tail + b"\n" + prompt).decode(errors="replace")
        lines = ["".join(filter(str.isprintable, line))[:LINE_CHARACTERS] for line in text.splitlines()]
        lines = [line for line in lines if line.strip() and not line.startswith("[W")]  # torch's warnings
        # Lines of srun, ssh and kubectl about the end of an agent come after those of the agent.
        return ([line for line in lines if not line.startswith(ENDINGS)] or lines or [""])[-1]

    def leave(self) -> None:
        """Close the link, so that the agent exits."""
        for pipe in self._pipes:
            pipe.close()

    def end(self, within_s: float) -> None:
        """Wait until the process has ended, and kill its group after `within_s` seconds."""
        try:
            self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()


class RemoteRanks:
    """Ranks of one cell on the machine of an agent."""

    def __init__(self, node: RemoteNode, job: NodeJob, folder: Path) -> None:
        self.ranks = job.ranks
        self._node, self._folder = node, folder
        self._events: list[NodeEvent] = []
        self._progress: int | None = None
        """Newest progress that was received and not yet returned."""
        self._activities: Mapping[int, RankActivity] | None = None
        self._ends: list[RankEnd] | None = None

    def waitables(self) -> list[int]:
        return [] if self._node.lost_reason is not None else [self._node.link.reads]

    def take_events(self) -> list[NodeEvent]:
        self._receive()
        reason = self._node.lost_reason
        events, self._events = self._events, []
        return events if reason is None else [*events, NodeLost(reason)]

    def count_progress(self) -> int | None:
        progress, self._progress = self._progress, None
        return progress

    def ask_for_activity(self, wait_s: float) -> Mapping[int, RankActivity]:
        self._node.send(AskForActivity(wait_s))
        self._receive_until(lambda: self._activities is not None, wait_s + SILENT_S)
        activities, self._activities = self._activities or {}, None
        return activities

    def stop(self) -> None:
        self._node.send(Stop())

    def ends(self) -> list[RankEnd]:
        """Return the end of every rank; on a lost node an end has only the reason why the node is lost."""
        self._receive_until(lambda: self._ends is not None, ANSWER_S)
        if self._ends is not None:
            return [replace(end, node=self._node.host) for end in self._ends]
        # Later on, a late answer would be taken for the answer about the next cell.
        link = self._node.link
        link.lost_reason = link.lost_reason or f"its agent did not end its ranks within {ANSWER_S:g} s"
        reason = str(self._node.lost_reason)
        return [RankEnd.on_lost_node(rank, reason, self._node.host) for rank in self.ranks]

    def _receive(self) -> None:
        for report in self._node.receive():
            self._events += report.events
            self._progress = self._progress if report.progress is None else report.progress
            self._activities = self._activities if report.activities is None else report.activities
            self._ends = report.ends or self._ends
            for name, content in report.files.items():
                (self._folder / Path(name).name).write_bytes(content)

    def _receive_until(self, has_arrived: Callable[[], bool], within_s: float) -> None:
        """Receive until this has arrived, the node is lost, or `within_s` seconds have passed."""
        until_s = time.monotonic() + within_s
        self._receive()
        while not has_arrived() and self._node.lost_reason is None and time.monotonic() < until_s:
            wait(self.waitables(), timeout=ACKNOWLEDGE_S)
            self._node.link.send(b"\n")
            self._receive()
