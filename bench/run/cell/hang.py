"""Detect that a cell hangs, and find the rank that keeps the others waiting.

A cell hangs when no rank has reported progress, that is a phase or a step, for the larger of
`measure.hang_timeout_s` and ten times the longest step so far. Compilers and first collectives may take
minutes, so the limit is at least FIRST_STEP_S until the first full-length step has ended. While ranks connect
(phase JOIN), it is the larger of JOIN_S and half of `measure.hang_timeout_s`. On a hang, every live rank
writes its stack.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.config import Cell
from bench.ranks.log import JOIN, RankStage
from bench.run.node.ranks import NodeRanks
from bench.run.node.stacks import STACK_S, RankActivity

JOIN_S = 60.0
"""Time limit in the phase JOIN, in seconds. Ranks compile nothing there and transfer a few bytes. CUDA and
NCCL start within seconds, with many ranks within tens of seconds; in a broken set-up they never do."""
FIRST_STEP_S = 600.0
"""Smallest time limit before the first full-length step has ended, in seconds."""
LIMIT_IN_STEPS = 10
"""Time limit in multiples of the longest step so far."""
PATIENT_STACK_S = 5 * STACK_S
"""Seconds that ranks have to write their stacks if no rank has failed; after a failure they have STACK_S."""
UNCLEAR = "the stacks do not show which rank keeps the others waiting"


@dataclass(frozen=True, slots=True)
class HangReport:
    """Rank that keeps the others waiting, with a message about what all ranks do."""

    rank: int
    """The first live rank if the stacks do not show which one it is; the message then says so."""
    message: str


class HangWatch:
    """Compares the time since the last progress of a cell's ranks with the time limit."""

    def __init__(self, cell: Cell, now_s: Callable[[], float] = time.monotonic) -> None:
        """Take the limits from the cell; with `measure.hang_timeout_s` of 0 no cell hangs."""
        self._measure = cell.measure
        self._now_s = now_s
        self._progress: Mapping[int, int] = {}
        self._progressed_at_s = now_s()
        self._longest_step_s: float | None = None
        self._is_joining = False

    def record_stage(self, stage: RankStage) -> None:
        """Record whether the first rank joins, and the duration of a full-length step if it has one."""
        self._is_joining = stage.pass_name == JOIN
        if stage.step_s is not None:
            self._longest_step_s = max(stage.step_s, self._longest_step_s or 0.0)

    @property
    def limit_s(self) -> float:
        """Longest time without progress that is no hang, in seconds."""
        timeout_s = self._measure.hang_timeout_s
        if self._is_joining and self._progress and all(self._progress.values()):
            # Ranks run on every node, so none of them still imports packages.
            return max(timeout_s / 2, JOIN_S)
        if self._longest_step_s is None:
            return max(timeout_s, FIRST_STEP_S)
        return max(timeout_s, LIMIT_IN_STEPS * self._longest_step_s)

    def record_progress(self, progress: Mapping[int, int]) -> None:
        """Record the number of phases and steps that the ranks of each node have begun."""
        if progress != self._progress:
            self._progress, self._progressed_at_s = {**progress}, self._now_s()

    @property
    def is_hanging(self) -> bool:
        """Whether no rank has reported progress within the limit."""
        return self._measure.hang_timeout_s != 0 and self._now_s() - self._progressed_at_s >= self.limit_s

    def report(self, nodes: Sequence[NodeRanks], live: Sequence[int]) -> HangReport:
        """Let the live ranks write their stacks, and return a report of the hang."""
        activities = _ask_for_activity(nodes, live)
        cause = explain_hang(activities)
        return HangReport(
            cause.rank,
            f"no rank has reported progress for {self.limit_s:.0f} s: {cause.message}; stacks are at the end"
            " of the ranks' logs; if the cell is only slow, raise measure.hang_timeout_s, or set it to 0 to"
            " wait until measure.timeout_s",
        )

    def report_at_deadline(self, nodes: Sequence[NodeRanks], live: Sequence[int]) -> HangReport | None:
        """Return a report of the missed deadline, or None if the stacks do not show the cause."""
        cause = find_cause(_ask_for_activity(nodes, live))
        if cause is None:
            return None
        return HangReport(
            cause.rank,
            f"the cell did not end within measure.timeout_s={self._measure.timeout_s:g}: {cause.message};"
            " stacks are at the end of the ranks' logs; if the cell is only slow, raise measure.timeout_s",
        )


def _ask_for_activity(nodes: Sequence[NodeRanks], live: Sequence[int]) -> dict[int, RankActivity]:
    """Return the activity of the live ranks; a rank that does not answer is unresponsive."""
    answers = {
        rank: activity for node in nodes for rank, activity in node.ask_for_activity(PATIENT_STACK_S).items()
    }
    return {rank: answers.get(rank, RankActivity()) for rank in live}


def explain_hang(activities: Mapping[int, RankActivity]) -> HangReport:
    """Return the rank that keeps the others waiting, or the first rank and what all ranks do."""
    states = ", ".join(f"rank {rank} is {activity.location}" for rank, activity in activities.items())
    return find_cause(activities) or HangReport(next(iter(activities)), f"{UNCLEAR}: {states}")


def find_cause(activities: Mapping[int, RankActivity]) -> HangReport | None:
    """Return the rank that keeps the others waiting, or None if their stacks do not show it.

    The first kind of rank in this list that exists is returned:

    1. a rank that a signal has stopped;
    2. a rank in no collective whose GPU is idle, while another rank's GPU is busy;
    3. a rank in no collective, while other ranks wait in one;
    4. a rank whose location differs from that of most ranks.
    """
    waiting = {rank: activity for rank, activity in activities.items() if activity.collective is not None}
    absent = [rank for rank in activities if rank not in waiting]
    for rank, activity in activities.items():
        if activity.is_stopped:
            state = f"rank {rank} is stopped by a signal such as SIGSTOP"
            return HangReport(rank, f"{state}{_describe_others(rank, waiting)}")
    for rank in absent:
        if activities[rank].is_idle and not all(activity.is_idle for activity in activities.values()):
            others = _describe_others(rank, waiting) or ", while other GPUs are busy"
            return HangReport(rank, f"rank {rank} is {activities[rank].location} and its GPU is idle{others}")
    if absent and waiting:
        rank = absent[0]
        return HangReport(
            rank, f"rank {rank} is {activities[rank].location}{_describe_others(rank, waiting)}"
        )
    return _find_outlier(activities)


def _find_outlier(activities: Mapping[int, RankActivity]) -> HangReport | None:
    """Return the first rank outside of the location of most ranks; None without such a location or rank."""
    locations = {rank: activity.location for rank, activity in activities.items()}
    for common, count in Counter(locations.values()).most_common(1):
        if len(locations) / 2 < count < len(locations):
            rank = next(rank for rank, location in locations.items() if location != common)
            return HangReport(rank, f"rank {rank} is {locations[rank]}{_describe_others(rank, activities)}")
    return None


def _describe_others(rank: int, activities: Mapping[int, RankActivity]) -> str:
    """Return text such as `, while ranks 0 and 2 wait in all_reduce`; empty if `rank` is the only one."""
    ranks_at: dict[str, list[int]] = {}
    for other, activity in activities.items():
        if other != rank:
            ranks_at.setdefault(activity.location, []).append(other)
    parts = []
    for location, ranks in ranks_at.items():
        is_waiting = activities[ranks[0]].collective is not None
        if len(ranks) == 1:
            parts.append(f"rank {ranks[0]} {'waits' if is_waiting else 'is'} {location}")
        else:
            names = f"{', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
            parts.append(f"ranks {names} {'wait' if is_waiting else 'are'} {location}")
    return f", while {' and '.join(parts)}" if parts else ""
