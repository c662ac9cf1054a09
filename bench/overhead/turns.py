"""Steps of several kinds in turns, in one set of processes: what a machine's neighbours do falls on all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import count
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from bench.node.job import RankJob
from bench.node.worker import join
from bench.overhead.steps import Kinds, TimeMs
from bench.ranks.groups import make_groups
from bench.ranks.log import RankLog
from bench.strategies import STRATEGIES, runnable
from bench.workloads import Rank
from bench.workloads.train import Train

WARM_UP_ROUNDS = 3
PAIR = ("bare", "harness")
ORDER = "0110100110010110"
"""One round of the two kinds of a pair, eight steps each, by the sequence of Thue and Morse.

Whatever changes slowly falls on both kinds alike: a drift over the round cancels if it is a polynomial of
degree three at most. Neighbouring steps take alike long (a lag-1 correlation of 0.4 to 0.7 was found on two
busy cores), so that single steps are no independent samples; the differences within rounds showed none.
"""


class Turns:
    """Runs steps of several kinds in turns. Every rank has the same results: those of the slowest rank."""

    def __init__(self, kinds: Mapping[str, TimeMs]) -> None:
        self._kinds = kinds
        self._numbers = count()
        self.bare_ms: list[float] = []
        """Of every round of pairs."""

    def of_all(self, rounds: int) -> dict[str, list[float]]:
        """So many rounds of one step of each kind, in alternating order."""
        times_ms: dict[str, list[float]] = {name: [] for name in self._kinds}
        names = [*self._kinds]
        for number in range(rounds):
            order = names if number % 2 else names[::-1]
            for name, step_ms in zip(order, self._run(order), strict=True):
                times_ms[name].append(step_ms)
        return times_ms

    def of_pair(self) -> float:
        """One round of a pair: the mean of log(timed / bare).

        Every other round exchanges the two kinds: a round's first step finds colder caches than the others.
        """
        exchanged = len(self.bare_ms) % 2
        order = [PAIR[int(place) ^ exchanged] for place in ORDER]
        logs: dict[str, list[float]] = {name: [] for name in PAIR}
        for name, step_ms in zip(order, self._run(order), strict=True):
            logs[name].append(math.log(step_ms))
        bare, harness = (fmean(logs[name]) for name in PAIR)
        self.bare_ms.append(math.exp(bare))
        return harness - bare

    def _run(self, order: Sequence[str]) -> list[float]:
        """One step each, on the same data: the slowest rank's milliseconds."""
        number, took_ms = next(self._numbers), []
        for name in order:
            dist.barrier()
            took_ms.append(self._kinds[name](number))
        slowest = torch.tensor(took_ms, dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        slowest_ms: list[float] = slowest.tolist()
        return slowest_ms


def compare(job: RankJob, log: RankLog, rounds: int, instrument_rounds: int) -> dict[str, Any]:
    """A rank's whole life: instruments first, then bare and timed steps."""
    with log.during("compare"):
        device, cell = join(job), job.cell
        strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
        with strategy.install() as wiring:
            kinds = Kinds(Train(Rank(strategy, wiring, device, log.step)), job.folder)
            turns = Turns(kinds.table())
            turns.of_all(WARM_UP_ROUNDS)
            collectives = kinds.collectives()
            times_ms = turns.of_all(instrument_rounds)
            log_ratios = [turns.of_pair() for _ in range(rounds)]
    return {
        "collectives": collectives,
        "times_ms": times_ms,
        "log_ratios": log_ratios,
        "bare_ms": turns.bare_ms,
    }
