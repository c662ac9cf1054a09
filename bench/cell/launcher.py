"""Runs the ranks of one cell at a time, on the nodes it has."""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cell.hang import HangWatch
from bench.cell.watch import SILENT, Listener, Watch
from bench.config import RunConfig
from bench.node.end import RankEnd
from bench.node.job import NodeJob
from bench.node.local import LocalNode
from bench.node.ranks import NodeRanks

if TYPE_CHECKING:
    from bench.node.worker import RankEntry


class Launcher:
    """Starts the ranks of one cell at a time. Imports no torch and never touches CUDA."""

    def __init__(self, packages: Collection[str] | None = None) -> None:
        """`packages` of others are imported before ranks start, by default all that any cell may need."""
        self._node = LocalNode(packages)

    def warm(self) -> None:
        """Have what ranks need imported, in the background; what has been stays as it is."""
        self._node.warm()

    def run(
        self,
        cell: RunConfig,
        folder: Path,
        *,
        entry: RankEntry | None = None,
        listener: Listener = SILENT,
        known: frozenset[str] = frozenset(),
    ) -> list[RankEnd]:
        """Run a cell's ranks to their ends, by the deadline at the latest; none is left when it returns."""
        deadline = time.monotonic() + cell.measure.timeout_s
        job = NodeJob(cell, 0, tuple(range(cell.cluster.world_size)), known=known)
        started: list[NodeRanks] = []
        try:
            started.append(self._node.start(job, folder, entry))
            watch = Watch(started, HangWatch(cell))
            watch.follow(deadline, listener)
        finally:
            for each in started:
                each.stop()
        return watch.ends()
