"""A cell as its node and its ranks receive it, and the files that a rank leaves in the cell's folder."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.config import Cell
from bench.ranks.log import RankLog


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A store that the ranks of several nodes meet in, on one of the nodes."""

    host: str
    port: int
    prefix: str
    """Of the keys of this run of a cell, as one store serves a whole sweep."""


@dataclass(frozen=True, slots=True)
class NodeJob:
    """The part of a cell that one node runs."""

    cell: Cell
    ranks: tuple[int, ...]
    """Those of the cell that it runs, one after another."""
    store: StoreAddress | None = None
    """None where the cell has one node: its ranks meet in a file."""
    known: frozenset[str] = frozenset()
    """Passes whose sections an equal cell of the sweep has: they are not run again."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """The part of a cell that one rank runs, and where."""

    cell: Cell
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


RankEntry = Callable[[RankJob, RankLog], dict[str, Any]]
"""What a rank does once it is prepared; its return value is the rank's report."""
LOG_TAIL_BYTES = 8000
"""Enough for the reason that NCCL's watchdog prints: up to 4,000 bytes of C++ stacks follow it."""


def log_path(folder: Path, rank: int) -> Path:
    """Where a rank's output goes."""
    return folder / f"rank_{rank}.log"


def report_path(folder: Path, rank: int) -> Path:
    """What a rank writes when it has done everything; an exit code of 0 does not prove that."""
    return folder / f"rank_{rank}.report.json"


def failure_path(folder: Path, rank: int) -> Path:
    """What a rank writes when an error ended it."""
    return folder / f"rank_{rank}.failure.json"


def read_file(path: Path) -> dict[str, Any] | None:
    """A file's content; None where there is none."""
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def take_file(path: Path) -> dict[str, Any] | None:
    """Read a rank's file and remove it: its content goes into the record."""
    content = read_file(path)
    path.unlink(missing_ok=True)
    return content


def tail_of(path: Path) -> str:
    """The end of a log, however long it is; empty where there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        return file.read(LOG_TAIL_BYTES).decode(errors="replace")
