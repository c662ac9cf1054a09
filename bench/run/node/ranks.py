"""Interface between the launcher and the ranks of a cell on one node, on this machine or another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec

from bench.ranks.log import RankStage, RankState
from bench.record.record import OutOfMemory
from bench.run.node.job import NodeJob, RankEntry
from bench.run.node.stacks import RankActivity

LOST_PEER_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Application timeout caused pair closure",
    "Connection closed by remote peer",
    "remote process exited",
    "remote process exiting",
    "NCCL communicator was aborted",
)
"""Texts in the errors of gloo and NCCL on a rank whose peer has ended."""


class RankFailed(msgspec.Struct, frozen=True, tag=True):
    """Event: a rank has written a failure file, or has ended without a report."""

    rank: int
    lost_peer: bool
    """Whether the rank failed only because another rank had ended."""


class RankFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Error that ended a rank, as the rank wrote it."""

    phase: str | None
    step_phase: str | None = None
    kind: str
    message: str
    traceback: str
    failed_at_s: float
    """Time of the error on the host's monotonic clock."""
    out_of_memory: OutOfMemory | None = None


@dataclass(frozen=True, slots=True)
class RankEnd:
    """Exit code, report, failure and log of a rank that has ended."""

    rank: int
    exit_code: int | None
    """Negative for a signal; None for a rank that had to be stopped."""
    report: dict[str, Any] | None
    """Results of all passes; None unless the rank finished all of them."""
    failure: RankFailure | None
    """Error that ended the rank; None without an error, or if the rank could not write it."""
    log_tail: str
    detected_after_s: float | None = None
    """Seconds from the rank's failure, or from its end if it wrote none, until all ranks were stopped."""
    state: RankState | None = None
    """Last phase that the rank recorded; None if it recorded none."""
    node: str | None = None
    """Host name of the node of the rank; None for this machine."""
    node_lost: str | None = None
    """Reason why the rank's node is out of reach; nothing else is then known. None if it is within reach."""
    hang: str | None = None
    """Message about the hang or missed deadline that this rank probably caused; at most one rank has it."""

    @classmethod
    def on_lost_node(cls, rank: int, reason: str, node: str | None = None) -> RankEnd:
        """Return the end of a rank whose node is out of reach."""
        return cls(rank, None, None, None, "", node=node, node_lost=reason)


def is_lost_peer_failure(failure: RankFailure) -> bool:
    """Return whether a rank failed only because another rank had ended."""
    return any(text in failure.message for text in LOST_PEER_TEXTS)


class RankEnded(msgspec.Struct, frozen=True, tag=True):
    """Event: the process of a rank has ended."""

    rank: int


class NodeLost(msgspec.Struct, frozen=True, tag=True):
    """Event: a node is out of reach, and all its ranks with it."""

    reason: str


NodeEvent = RankStage | RankFailed | RankEnded | NodeLost


class NodeRanks(Protocol):
    """Ranks of one cell on one node. After `stop` none of them runs."""

    @property
    def ranks(self) -> Sequence[int]:
        """Numbers of these ranks in the cell."""

    def waitables(self) -> Sequence[Connection | int]:
        """Return objects for `multiprocessing.connection.wait` that become ready when there is an event."""

    def take_events(self) -> Sequence[NodeEvent]:
        """Return the events since the last call, without waiting."""

    def count_progress(self) -> int | None:
        """Return the number of phases and steps that these ranks have begun; None without a new count."""

    def ask_for_activity(self, wait_s: float) -> Mapping[int, RankActivity]:
        """Let the live ranks write their stacks into their logs, and return the activity of each.

        Waits at most `wait_s` seconds for the stacks.
        """

    def stop(self) -> None:
        """End the ranks that still run."""

    def ends(self) -> list[RankEnd]:
        """Return the end of every rank. Call `stop` first."""


class Node(Protocol):
    """Machine that runs ranks."""

    @property
    def lost_reason(self) -> str | None:
        """Reason why the node is out of reach; None while it is within reach."""

    @property
    def description(self) -> Mapping[str, Any] | None:
        """Host, address and environment of another machine; None for the launcher's own."""

    @property
    def store(self) -> tuple[str, int] | None:
        """Host and port of a store in which ranks of several nodes meet; None for the launcher's machine."""

    def warm(self) -> None:
        """Import what ranks need, in the background; a second call does nothing."""

    def start(self, job: NodeJob, folder: Path, entry: RankEntry | None = None) -> NodeRanks:
        """Start the ranks of a job on this node.

        Args:
            job: The cell, and which of its ranks run here.
            folder: Folder of the cell on the launcher's machine, for logs and failure files.
            entry: Function that the ranks run; by default the passes of the cell.
        """
