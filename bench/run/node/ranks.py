"""The ranks of a cell on one node, this machine or another, as the launcher sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from bench.ranks.log import Stage
from bench.run.node.end import Failing, RankEnd
from bench.run.node.job import NodeJob
from bench.run.node.stacks import Doing

if TYPE_CHECKING:
    from bench.run.node.worker import RankEntry


class Left(msgspec.Struct, frozen=True, tag=True):
    """A rank is no more."""

    rank: int


class Lost(msgspec.Struct, frozen=True, tag=True):
    """The node is out of reach, and all its ranks with it."""

    why: str


News = Stage | Failing | Left | Lost


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
