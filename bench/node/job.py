"""What a node and its ranks are told of a cell."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.config import RunConfig


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store that the ranks of several nodes meet in, on one of the nodes."""

    host: str
    port: int
    prefix: str
    """Of the keys of this run of a cell, as one store serves a whole sweep."""


@dataclass(frozen=True, slots=True)
class NodeJob:
    """What one node is told of a cell."""

    cell: RunConfig
    ranks: tuple[int, ...]
    """Those of the cell that it runs, one after another."""
    store: StoreAddress | None = None
    """None where the cell has one node: its ranks meet in a file."""
    known: frozenset[str] = frozenset()
    """Passes whose sections an equal cell of the sweep has: they are not run again."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """What one rank is told."""

    cell: RunConfig
    rank: int
    folder: Path
    """Where its log, its report and its failure go."""
    scratch: Path | None
    """A folder shared by the ranks of its node, where they note their places; None under torchrun."""
    rendezvous: Path | StoreAddress | None
    """A file shared by the cell's ranks, or a store; None for env://, under torchrun."""
    local_rank: int = 0
    local_world_size: int = 1
    """Ranks on its node."""
    interface: str | None = None
    """Of the network that leads to the other nodes; None where gloo finds it itself."""
    known: frozenset[str] = frozenset()
