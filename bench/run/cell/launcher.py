"""Runs the ranks of one cell at a time, on the nodes it has."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.config import Cell
from bench.run.cell.hang import HangWatch
from bench.run.cell.rank_watch import SILENT, Listener, Watch
from bench.run.node.job import NodeJob, RankEntry, StoreAddress
from bench.run.node.local import LocalNode
from bench.run.node.ranks import Node, RankEnd


class Launcher:
    """Starts the ranks of one cell at a time. Imports no torch and never touches CUDA."""

    def __init__(self, nodes: Sequence[Node] | None = None) -> None:
        """Ranks run on these nodes, by default on this machine."""
        self.is_local = nodes is None
        self._nodes: Sequence[Node] = [LocalNode()] if nodes is None else nodes

    def warm(self) -> None:
        """Have what ranks need imported, in the background; what has been stays as it is."""
        for node in self._nodes:
            node.warm()

    def nodes_for(self, cell: Cell) -> list[Node]:
        """The first of the nodes that are left, as many as the cell needs, or all."""
        return [node for node in self._nodes if node.lost is None][: cell.cluster.nodes]

    def run(
        self,
        cell: Cell,
        folder: Path,
        *,
        entry: RankEntry | None = None,
        listener: Listener = SILENT,
        known: frozenset[str] = frozenset(),
    ) -> list[RankEnd]:
        """Run a cell's ranks to their ends, by the deadline at the latest; none is left when it returns."""
        deadline = time.monotonic() + cell.measure.timeout_s
        nodes = self.nodes_for(cell)
        if len(nodes) < cell.cluster.nodes:
            why = f"{len(nodes)} of {len(self._nodes)} nodes are left, the cell needs {cell.cluster.nodes}"
            return [RankEnd.of_lost_node(rank, why) for rank in cell.running_ranks]
        address = nodes[0].store if len(nodes) > 1 else None
        store = None if address is None else StoreAddress(*address, secrets.token_hex(8))
        with ExitStack() as started:
            ranks = []
            for number, node in enumerate(nodes):
                running = [rank for rank in cell.cluster.ranks_of(number) if rank in cell.running_ranks]
                job = NodeJob(cell, tuple(running), store, known)
                ranks.append(node.start(job, folder, entry))
                started.callback(ranks[-1].stop)
            watch = Watch(ranks, HangWatch(cell))
            watch.follow(deadline, listener)
        return watch.ends()
