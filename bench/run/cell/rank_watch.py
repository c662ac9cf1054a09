"""Follow the ranks of a cell until they have ended, hang, or reach the deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing.connection import wait

from bench.ranks.log import RankStage
from bench.run.cell.hang import HangReport, HangWatch
from bench.run.node.ranks import NodeLost, NodeRanks, RankEnd, RankEnded, RankFailed
from bench.run.node.stacks import STACK_S

GRACE_S = 3.0
"""Seconds that the other ranks have to write their own failures once one rank has failed."""
LOST_PEER_GRACE_S = 20.0
"""Seconds that the other ranks have if the failed rank only lost its connection to a peer. That peer may
clean up before it writes its own failure."""
TICK_S = 1.0
"""Seconds between two calls of `Listener.on_tick`, which must not load the ranks' cores."""


class Listener:
    """Receives the progress of a running cell, in the launcher's thread. This base class ignores it."""

    def on_stage(self, stage: RankStage) -> None:
        """Handle a stage that the first rank has begun."""

    def on_tick(self) -> None:
        """Handle the passing of time; called about every TICK_S seconds while ranks run."""


SILENT = Listener()


class RankWatch:
    """Follows the ranks of a cell until they have ended or must be stopped."""

    def __init__(self, nodes: Sequence[NodeRanks], hang_watch: HangWatch) -> None:
        self._nodes = nodes
        self._hang_watch = hang_watch
        self._live = {rank for node in nodes for rank in node.ranks}
        self._progress = dict.fromkeys(range(len(nodes)), 0)
        """Number of phases and steps that the ranks of each node had begun when they were last counted."""
        self._hang_report: HangReport | None = None

    def follow(self, deadline: float, listener: Listener) -> None:
        """Return once every rank has ended, the ranks hang, or the deadline has passed.

        In the last two cases, ranks still run, and have been asked for their stacks.

        Args:
            deadline: Time on the monotonic clock. Once a rank has failed, the other ranks have at most
                GRACE_S or LOST_PEER_GRACE_S.
            listener: Receives the progress of the ranks.
        """
        has_failed = False
        while self._live:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self._ask_for_stacks(has_failed=has_failed)
                return
            waitables = [waitable for node in self._nodes for waitable in node.waitables()]
            wait(waitables, timeout=min(left_s, TICK_S))
            for grace_s in self._handle_events(listener):
                has_failed = True
                deadline = min(deadline, time.monotonic() + grace_s)
            if self._record_progress() and self._hang_watch.is_hanging and not has_failed:
                self._hang_report = self._hang_watch.report(self._nodes, sorted(self._live))
            listener.on_tick()
            if self._hang_report is not None:
                return

    def ends(self) -> list[RankEnd]:
        """Return the end of every rank, in the order of the ranks. Call it after all ranks have been stopped.

        The end of the rank that caused a hang has the message about it.
        """
        ends = [end for node in self._nodes for end in node.ends()]
        report = self._hang_report
        return [
            replace(end, hang=report.message) if report is not None and end.rank == report.rank else end
            for end in sorted(ends, key=lambda end: end.rank)
        ]

    def _handle_events(self, listener: Listener) -> Iterator[float]:
        """Handle the new events of all nodes; for each failure yield the seconds that other ranks have."""
        for node in self._nodes:
            for event in node.take_events():
                match event:
                    case RankStage():
                        self._hang_watch.record_stage(event)
                        listener.on_stage(event)
                    case RankEnded(rank):
                        self._live.discard(rank)
                    case RankFailed():
                        # A rank that lost its peer may fail before that peer has written its own failure.
                        yield LOST_PEER_GRACE_S if event.lost_peer else GRACE_S
                    case NodeLost():
                        self._live.difference_update(node.ranks)
                        yield GRACE_S

    def _record_progress(self) -> bool:
        """Record the progress of nodes that have a new count; return whether any node has."""
        new = {n: count for n, node in enumerate(self._nodes) if (count := node.count_progress()) is not None}
        self._progress |= new
        self._hang_watch.record_progress(self._progress)
        return bool(new)

    def _ask_for_stacks(self, *, has_failed: bool) -> None:
        """Let the ranks write their stacks into their logs before they are stopped."""
        if has_failed:
            for node in self._nodes:
                node.ask_for_activity(STACK_S)
        else:
            self._hang_report = self._hang_watch.report_at_deadline(self._nodes, sorted(self._live))
