"""Run the ranks of one cell at a time, on one or several nodes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.config import Cell
from bench.run.cell.hang import HangWatch
from bench.run.cell.rank_watch import SILENT, Listener, RankWatch
from bench.run.node.job import NodeJob, RankEntry, StoreAddress
from bench.run.node.local import LocalNode
from bench.run.node.ranks import Node, RankEnd


class Launcher:
    """Starts and follows the ranks of one cell at a time. Imports no torch and never touches CUDA."""

    def __init__(self, nodes: Sequence[Node] | None = None) -> None:
        """Run ranks on these nodes, or on this machine by default."""
        self.is_local = nodes is None
        """Whether ranks run on this machine only."""
        self._nodes: Sequence[Node] = [LocalNode()] if nodes is None else nodes

    def warm(self) -> None:
        """Import what ranks need on every node, in the background; a second call does nothing."""
        for node in self._nodes:
            node.warm()

    def nodes_for(self, cell: Cell) -> list[Node]:
        """Return the first nodes within reach: the number that the cell needs, or fewer if nodes are lost."""
        return [node for node in self._nodes if node.lost_reason is None][: cell.cluster.nodes]

    def run(
        self,
        cell: Cell,
        folder: Path,
        *,
        entry: RankEntry | None = None,
        listener: Listener = SILENT,
        skipped_passes: frozenset[str] = frozenset(),
    ) -> list[RankEnd]:
        """Run the ranks of a cell, at most until the cell's deadline, and return the end of every rank.

        No rank runs when this returns. If too few nodes are left, no rank starts, and every end says so.

        `entry` is the function that the ranks run; by default, they run the passes of the cell.
        """
        deadline = time.monotonic() + cell.measure.timeout_s
        nodes = self.nodes_for(cell)
        if len(nodes) < cell.cluster.nodes:
            reason = f"{len(nodes)} of {len(self._nodes)} nodes are left, the cell needs {cell.cluster.nodes}"
            return [RankEnd.on_lost_node(rank, reason) for rank in cell.running_ranks]
        address = nodes[0].store if len(nodes) > 1 else None
        store = None if address is None else StoreAddress(*address, secrets.token_hex(8))
        with ExitStack() as stops:
            ranks = []
            for number, node in enumerate(nodes):
                running = [rank for rank in cell.cluster.ranks_on_node(number) if rank in cell.running_ranks]
                job = NodeJob(cell, tuple(running), store, skipped_passes)
                ranks.append(node.start(job, folder, entry))
                stops.callback(ranks[-1].stop)
            watch = RankWatch(ranks, HangWatch(cell))
            watch.follow(deadline, listener)
        return watch.ends()
