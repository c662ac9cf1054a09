"""The ranks of a cell on one node, this machine or another, as the launcher sees them, to their ends."""

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
from bench.run.node.stacks import Doing

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


class Failing(msgspec.Struct, frozen=True, tag=True):
    """A rank has failed, or left without a report; it reports a failure as soon as that is on the disk."""

    rank: int
    lost_a_peer: bool
    """Whether only because another rank was gone."""


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
    """How one rank ended, and what it left."""

    rank: int
    exit_code: int | None
    """Negative for a signal; None for a rank that had to be stopped."""
    report: dict[str, Any] | None
    """There only when every pass was done."""
    failure: RankFailure | None
    """There only when an error ended the rank, and it could still write it."""
    log_tail: str
    detected_after_s: float | None = None
    """Seconds from its failure, or else its own end, to the end of all ranks."""
    place: RankState | None = None
    """Where it was last, as it noted itself; None where it never did."""
    node: str | None = None
    """The host that it was on, where that is another machine."""
    node_lost: str | None = None
    """Why nothing is known of it: its node is out of reach."""
    hang: str | None = None
    """What it did while the others waited for it; of one rank at the most, and only where the cell was ended
    for it or at its deadline."""

    @classmethod
    def of_lost_node(cls, rank: int, why: str, node: str | None = None) -> RankEnd:
        """The end of a rank of which nothing is known."""
        return cls(rank, None, None, None, "", node=node, node_lost=why)

    @property
    def why(self) -> str:
        """Why there is no report, in one line, for commands that keep no record."""
        text = self.failure.message if self.failure is not None else self.log_tail
        last = (text.strip().splitlines() or [f"exit code {self.exit_code}"])[-1]
        return f"rank {self.rank}: {last}; try one such cell in a sweep, whose record says more"


def lost_a_peer(failure: RankFailure) -> bool:
    """Whether a rank failed only because another rank was gone."""
    return any(text in failure.message for text in LOST_PEER_TEXTS)


class Left(msgspec.Struct, frozen=True, tag=True):
    """A rank is no more."""

    rank: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The node is out of reach, and all its ranks with it."""

    why: str


News = RankStage | Failing | Left | Lost


class NodeRanks(Protocol):
    """The ranks of a cell on one node. None is left once they were stopped."""

    @property
    def ranks(self) -> Sequence[int]:
        """Their numbers in the cell."""

    def waits(self) -> Sequence[Connection | int]:
        """What becomes ready when there is news."""

    def news(self) -> Sequence[News]:
        """What has happened since the last call; does not wait."""

    def look(self) -> int | None:
        """How many phases and steps they have begun, all together; None where the last look was just now."""

    def ask(self, wait_s: float) -> Mapping[int, Doing]:
        """What each live rank is doing, written into its log too; waits for their answers at most so long."""

    def stop(self) -> None:
        """End those that have not ended."""

    def ends(self) -> list[RankEnd]:
        """How each rank ended; after `stop`."""


class Node(Protocol):
    """A machine that runs ranks."""

    @property
    def lost(self) -> str | None:
        """Why it is out of reach; None while it is not."""

    @property
    def description(self) -> Mapping[str, Any] | None:
        """Its host, its address and its environment; None for the machine that this process runs on."""

    @property
    def store(self) -> tuple[str, int] | None:
        """Host and port of a store in which ranks of all nodes may meet; None for this machine."""

    def warm(self) -> None:
        """Have it import what ranks need, in the background; one that has stays as it is."""

    def start(self, job: NodeJob, folder: Path, entry: RankEntry | None = None) -> NodeRanks:
        """Start the ranks of a cell that are to run there; what they leave comes into the folder.

        Ranks run `entry`, by default the cell's passes.
        """
