"""Which rank keeps the others waiting, and when that is sure enough to end the cell.

A cell hangs where for a while none of its ranks has used the CPU, or where a signal has stopped one. A rank
that computes, however slowly, or that compiles, is left alone until the deadline; so is one that waits for a
process outside of the cell, such as another sweep's compilation. On a GPU ranks that wait for another spin:
there a rank hangs that alone does nothing, in no collective.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from bench.config import RunConfig
from bench.node.ranks import Answers, Look, NodeRanks
from bench.node.stacks import STACK_S, Doing

PATIENT_STACK_S = 5 * STACK_S
"""How long ranks have to write their stacks where nobody waits for them to end."""


@dataclass(frozen=True, slots=True)
class Blame:
    """The rank that did not arrive."""

    rank: int
    what: str
    """What it does, and what the others wait in."""


class HangWatch:
    """Looks whether a cell's ranks still do something."""

    def __init__(self, cell: RunConfig) -> None:
        """With `measure.silence_s` of 0 it finds nothing. On a GPU ranks that wait for another spin."""
        self._silence_s = cell.measure.silence_s
        self._waiting_spins = cell.cluster.device == "cuda"

    def found(self, nodes: Sequence[NodeRanks], looks: Sequence[Look]) -> Blame | None:
        """The rank that the others wait for in vain, by the last look at each node; None without one."""
        live = [rank for look in looks for rank in look.live]
        quiet = [rank for look in looks for rank in look.quiet]
        stopped = any(look.stopped for look in looks)
        if not stopped and (not quiet or (len(quiet) < len(live) and not self._waiting_spins)):
            return None
        answers = _asked(nodes)
        blame = self._judged(answers, sorted(quiet))
        if blame is None:
            for each in nodes:
                each.look_anew()
        return blame

    def _judged(self, answers: Answers, quiet: Sequence[int]) -> Blame | None:
        """The one of these quiet ranks that is to blame; None where they may only be waiting."""
        doing, stopped = answers.doing, answers.stopped & set(quiet)
        if not stopped and any(each.is_elsewhere for each in doing.values()):
            return None
        if self._waiting_spins:
            quiet = [rank for rank in quiet if rank not in doing or doing[rank].collective is None]
            if not quiet:
                return None
        blame = blamed(doing, stopped, quiet) or _indistinct(doing, quiet[0])
        since = f"has done nothing for {self._silence_s:.0f} s, {blame.what}"
        return Blame(blame.rank, f"{since}; measure.silence_s=0 waits until measure.timeout_s")


def blamed_at_deadline(nodes: Sequence[NodeRanks], live: Sequence[int]) -> Blame | None:
    """The rank of these that keeps the others waiting now; None where none can be told from the others."""
    answers = _asked(nodes)
    blame = blamed(answers.doing, answers.stopped, live)
    if blame is None:
        return None
    return Blame(
        blame.rank, f"still running at the deadline, {blame.what}; raise measure.timeout_s if it was slow"
    )


def _asked(nodes: Sequence[NodeRanks]) -> Answers:
    """What the ranks of all nodes were doing; each node is asked after the other."""
    answers = [each.ask(PATIENT_STACK_S) for each in nodes]
    doing = {rank: what for each in answers for rank, what in each.doing.items()}
    return Answers(doing, {rank for each in answers for rank in each.stopped})


def _indistinct(doing: Mapping[int, Doing], rank: int) -> Blame:
    """What is to be said where all ranks are in the same collective, or none is in any."""
    if rank not in doing:
        return Blame(rank, "without an answer")
    collective = doing[rank].collective
    return Blame(rank, f"in {doing[rank].where}" if collective is None else f"in {collective}, as every rank")


def blamed(doing: Mapping[int, Doing], stopped: AbstractSet[int], ranks: Sequence[int]) -> Blame | None:
    """The rank of these that keeps the others waiting; None where none can be told from the others.

    A stopped rank first, then one that is in no collective while others are, then one that waits in another
    collective than most. `doing` lacks ranks that did not write their stack.
    """
    waiting = {rank: each.collective for rank, each in doing.items() if each.collective is not None}
    absent = [rank for rank in ranks if rank not in waiting and rank not in stopped]
    if stopped:
        rank = min(stopped)
        return Blame(rank, f"stopped by a signal, such as SIGSTOP{_others(rank, waiting)}")
    if absent and waiting:
        rank = absent[0]
        where = f"in {doing[rank].where}" if rank in doing else "without an answer"
        return Blame(rank, f"{where}{_others(rank, waiting)}")
    return _in_another(waiting)


def _in_another(waiting: Mapping[int, str]) -> Blame | None:
    """The rank that waits in another collective than most, the first of several."""
    common = Counter(waiting.values()).most_common(1)
    other = next((rank for rank, name in waiting.items() if name != common[0][0]), None)
    if other is None:
        return None
    return Blame(other, f"in {waiting[other]}{_others(other, waiting)}")


def _others(rank: int, waiting: Mapping[int, str]) -> str:
    """`, while ranks 0 and 2 wait in all_reduce`."""
    by_name: dict[str, list[int]] = {}
    for other, name in waiting.items():
        if other != rank:
            by_name.setdefault(name, []).append(other)
    told = (f"{_named(each)} in {name}" for name, each in by_name.items())
    return f", while {' and '.join(told)}" if by_name else ""


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} wait"
