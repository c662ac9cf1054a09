"""A cell's ranks from their start to their ends: who has ended, who hangs, who has had its time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import wait

from bench.ranks.log import RankStage
from bench.run.cell.hang import Blame, HangWatch, blame_at_deadline
from bench.run.node.ranks import Failing, Left, Lost, NodeRanks, RankEnd
from bench.run.node.stacks import STACK_S

GRACE_S = 3.0
"""How long the others have to write their own reports once one rank has failed."""
LOST_PEER_GRACE_S = 20.0
"""How long they have if the rank only lost a peer, which may still clean up before it reports."""
TICK_S = 1.0
"""How often a listener is called: enough for a display, and no load on the ranks' cores."""


class Listener:
    """Receives the progress of a running cell, in the launcher's own thread. This base class ignores it."""

    def tell(self, stage: RankStage) -> None:
        """The first rank has begun this."""

    def tick(self) -> None:
        """Time has passed: about every TICK_S seconds while ranks run."""


SILENT = Listener()


class Watch:
    """Follows the ranks of a cell until they have ended or are to be ended."""

    def __init__(self, nodes: Sequence[NodeRanks], hang_watch: HangWatch) -> None:
        self._nodes = nodes
        self._hang_watch = hang_watch
        self._live = {rank for node in nodes for rank in node.ranks}
        self._progress = dict.fromkeys(range(len(nodes)), 0)
        """Phases and steps that each node's ranks had begun when it was last looked at."""
        self._blame: Blame | None = None

    def follow(self, deadline: float, listener: Listener) -> None:
        """Wait until every rank has ended, hangs, or has had its time; ask those that have not for stacks."""
        has_failed = False
        while self._live:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._ask_for_stacks(has_time=not has_failed)
                return
            wait([each for node in self._nodes for each in node.waits()], timeout=min(left_s, TICK_S))
            for grace_s in self._news(listener):
                has_failed = True
                deadline = min(deadline, time.monotonic() + grace_s)
            if self._record_progress() and self._hang_watch.is_hanging and not has_failed:
                self._blame = self._hang_watch.blame(self._nodes, sorted(self._live))
            listener.tick()
            if self._blame is not None:
                return

    def ends(self) -> list[RankEnd]:
        """How each rank ended, once all are over."""
        ends = [end for node in self._nodes for end in node.ends()]
        blame = self._blame
        return [
            replace(end, hang=blame.what) if blame is not None and end.rank == blame.rank else end
            for end in sorted(ends, key=lambda end: end.rank)
        ]

    def _news(self, listener: Listener) -> Iterator[float]:
        """Take in what has happened; of each failure how long the other ranks still have."""
        for node in self._nodes:
            for each in node.news():
                match each:
                    case RankStage():
                        self._hang_watch.tell(each)
                        listener.tell(each)
                    case Left(rank):
                        self._live.discard(rank)
                    case Failing():
                        # A rank that lost a peer may fail before the one that it lost has reported.
                        yield LOST_PEER_GRACE_S if each.lost_a_peer else GRACE_S
                    case Lost():
                        self._live.difference_update(node.ranks)
                        yield GRACE_S

    def _record_progress(self) -> bool:
        """Look at the nodes that are due; return whether any was."""
        new = {n: count for n, node in enumerate(self._nodes) if (count := node.look()) is not None}
        self._progress |= new
        self._hang_watch.record_progress(self._progress)
        return bool(new)

    def _ask_for_stacks(self, *, has_time: bool) -> None:
        """Have ranks that are about to be stopped write their stacks into their logs."""
        if has_time:
            self._blame = blame_at_deadline(self._nodes, sorted(self._live))
        else:
            for each in self._nodes:
                each.ask(STACK_S)
