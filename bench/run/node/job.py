"""Jobs of nodes and ranks, and the files that a rank writes into the folder of its cell."""

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
    """Address of the torch store on one node in which the ranks of all nodes meet."""

    host: str
    port: int
    prefix: str
    """Prefix of the keys of this run of a cell: one store serves the whole sweep."""


@dataclass(frozen=True, slots=True)
class NodeJob:
    """The part of a cell that one node runs."""

    cell: Cell
    ranks: tuple[int, ...]
    """Ranks of the cell that run on the node, in ascending order."""
    store: StoreAddress | None = None
    """Store for the rendezvous; None for a cell on one node, whose ranks meet in a file."""
    skipped_passes: frozenset[str] = frozenset()
    """Passes that do not run, for example because an earlier cell of the sweep has their sections."""


@dataclass(frozen=True, slots=True)
class RankJob:
    """The part of a cell that one rank runs, with its folders and its rendezvous."""

    cell: Cell
    rank: int
    folder: Path
    """Folder of the rank's log, report and failure file."""
    scratch: Path | None
    """Folder in which the ranks of a node keep their state files; None under torchrun."""
    rendezvous: Path | StoreAddress | None
    """File or store in which the cell's ranks meet; None under torchrun, which uses `env://`."""
    local_rank: int = 0
    local_world_size: int = 1
    """Number of ranks on the node of this rank."""
    interface: str | None = None
    """Network interface that leads to the other nodes; None if gloo chooses one."""
    skipped_passes: frozenset[str] = frozenset()
    """Passes that do not run, as in `NodeJob`."""


RankEntry = Callable[[RankJob, RankLog], dict[str, Any]]
"""Function that a prepared rank process runs; it returns the rank's report."""
LOG_TAIL_BYTES = 8000
"""Bytes of a log's end that go into a record. NCCL's watchdog prints up to 4,000 bytes of C++ stacks after
its reason."""


def log_path(folder: Path, rank: int) -> Path:
    """Return the path of the file that receives a rank's output."""
    return folder / f"rank_{rank}.log"


def report_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's report, which proves that the rank has finished; exit code 0 does not."""
    return folder / f"rank_{rank}.report.json"


def failure_path(folder: Path, rank: int) -> Path:
    """Return the path of the file in which a rank describes the error that ended it."""
    return folder / f"rank_{rank}.failure.json"


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file, or None if there is no file."""
    if not path.exists():
        return None
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def take_json(path: Path) -> dict[str, Any] | None:
    """Return the content of a JSON file and delete the file; None if there is no file."""
    content = read_json(path)
    path.unlink(missing_ok=True)
    return content


def read_log_tail(path: Path) -> str:
    """Return the last LOG_TAIL_BYTES of a log, or an empty string if there is no log."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        return file.read(LOG_TAIL_BYTES).decode(errors="replace")
