"""When a cell hangs, and which rank keeps the others waiting.

A cell hangs when no rank has reported progress, a phase or a step, for the larger of `measure.hang_timeout_s`
and ten times its longest step. Before the first full-length step has ended, compilers and first collectives
may take minutes: until then the limit is at least FIRST_STEP_S, except while ranks join: JOIN_S. Then every
live rank is asked for its stack.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.config import Cell
from bench.ranks.log import JOIN, RankStage
from bench.run.node.ranks import NodeRanks
from bench.run.node.stacks import STACK_S, Doing

JOIN_S = 60.0
"""Limit of silence in the phase JOIN, where ranks compile nothing and transfer a few bytes. CUDA's and NCCL's
start take seconds, on many ranks tens of seconds; a set-up in which they never end is found here."""
FIRST_STEP_S = 600.0
LONGEST_STEPS = 10
PATIENT_STACK_S = 5 * STACK_S
"""How long ranks have to write their stacks where nobody waits for them to end."""
NOBODY = "no rank is to blame more than another: "


@dataclass(frozen=True, slots=True)
class Blame:
    """The rank that did not arrive."""

    rank: int
    """The first live one where none can be told from the others, as `what` then says."""
    what: str
    """What it does, and what the others wait in."""


class HangWatch:
    """Follows the progress that a cell's ranks report."""

    def __init__(self, cell: Cell, now_s: Callable[[], float] = time.monotonic) -> None:
        """With `measure.hang_timeout_s` of 0 no cell hangs."""
        self._timeout_s = cell.measure.hang_timeout_s
        self._now_s = now_s
        self._progress: Mapping[int, int] = {}
        self._since_s = now_s()
        self._longest_step_s: float | None = None
        self._is_joining = False

    def tell(self, stage: RankStage) -> None:
        """Take note of the first rank's phase and of how long a full-length step took."""
        self._is_joining = stage.pass_name == JOIN
        if stage.step_s is not None:
            self._longest_step_s = max(stage.step_s, self._longest_step_s or 0.0)

    @property
    def limit_s(self) -> float:
        """How long no rank may report progress."""
        if self._is_joining and self._progress and all(self._progress.values()):
            # Every node has ranks: none of them still imports packages.
            return max(self._timeout_s / 2, JOIN_S)
        if self._longest_step_s is None:
            return max(self._timeout_s, FIRST_STEP_S)
        return max(self._timeout_s, LONGEST_STEPS * self._longest_step_s)

    def record_progress(self, progress: Mapping[int, int]) -> None:
        """Take note of how many phases and steps each node's ranks have begun."""
        if progress != self._progress:
            self._progress, self._since_s = {**progress}, self._now_s()

    @property
    def is_hanging(self) -> bool:
        """Whether no rank has reported progress for too long."""
        return self._timeout_s != 0 and self._now_s() - self._since_s >= self.limit_s

    def blame(self, nodes: Sequence[NodeRanks], live: Sequence[int]) -> Blame:
        """Return the live rank that keeps the others waiting, by the stacks of all of them."""
        doing = _ask(nodes, live)
        told = (f"rank {rank} is {each.whereabouts}" for rank, each in doing.items())
        rank, what = live[0], NOBODY + ", ".join(told)
        if (blame := find_blame(doing)) is not None:
            rank, what = blame.rank, f"it is {blame.what}"
        since = f"no rank has reported progress for {self.limit_s:.0f} s: {what}"
        return Blame(rank, f"{since}; measure.hang_timeout_s=0 waits until measure.timeout_s")


def blame_at_deadline(nodes: Sequence[NodeRanks], live: Sequence[int]) -> Blame | None:
    """Return the rank that keeps the others waiting now; None where none differs from the others."""
    blame = find_blame(_ask(nodes, live))
    if blame is None:
        return None
    return Blame(
        blame.rank, f"still running at the deadline, {blame.what}; raise measure.timeout_s if it was slow"
    )


def _ask(nodes: Sequence[NodeRanks], live: Sequence[int]) -> dict[int, Doing]:
    """Return what these ranks do now; each node is asked after the other."""
    answers = {rank: each for node in nodes for rank, each in node.ask(PATIENT_STACK_S).items()}
    return {rank: answers.get(rank, Doing()) for rank in live}


def find_blame(doing: Mapping[int, Doing]) -> Blame | None:
    """Return the rank that keeps the others waiting; None where none can be told from the others.

    A stopped rank first, then one whose GPU is idle while others spin in a collective's kernel. Then one
    that is in no collective while others are, then one that is in another collective, or else in another
    place, than most.
    """
    places = {rank: each.whereabouts for rank, each in doing.items()}
    waiting = {rank: place for rank, place in places.items() if doing[rank].collective is not None}
    absent = [rank for rank in doing if rank not in waiting]
    for rank in doing:
        if doing[rank].is_stopped:
            return Blame(rank, f"stopped by a signal, such as SIGSTOP{_others(rank, waiting)}")
    for rank in absent:
        if doing[rank].is_idle and not all(each.is_idle for each in doing.values()):
            others = _others(rank, waiting) or ", while the other GPUs are busy"
            return Blame(rank, f"{places[rank]} with nothing on its GPU{others}")
    if absent and waiting:
        return Blame(absent[0], f"{places[absent[0]]}{_others(absent[0], waiting)}")
    return _apart_from_most(places)


def _apart_from_most(places: Mapping[int, str]) -> Blame | None:
    """The first rank that is elsewhere than most; None where most are nowhere, or all are in one place."""
    for common, count in Counter(places.values()).most_common(1):
        if len(places) / 2 < count < len(places):
            rank = next(rank for rank, place in places.items() if place != common)
            return Blame(rank, f"{places[rank]}{_others(rank, places)}")
    return None


def _others(rank: int, places: Mapping[int, str]) -> str:
    """`, while ranks 0 and 2 wait in all_reduce`."""
    by_place: dict[str, list[int]] = {}
    for other, place in places.items():
        if other != rank:
            by_place.setdefault(place, []).append(other)
    told = (f"{_named(each)} {place}" for place, each in by_place.items())
    return f", while {' and '.join(told)}" if by_place else ""


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} wait"
