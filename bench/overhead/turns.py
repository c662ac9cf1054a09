"""Steps of both kinds in turns, in one set of processes: what a machine's neighbours do falls on both."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist

from bench.node.job import RankJob
from bench.node.worker import join
from bench.overhead.steps import Kinds
from bench.ranks.groups import make_groups
from bench.ranks.log import RankLog
from bench.strategies import STRATEGIES, runnable
from bench.workloads import Rank
from bench.workloads.train import Train

ORDER = "0110100110010110"
"""One round of bare steps (0) and timed ones (1), eight each, by the sequence of Thue and Morse.

Whatever changes slowly falls on both kinds alike: a drift over the round cancels if it is a polynomial of
degree three at most. Neighbouring steps take alike long (a lag-1 correlation of 0.4 to 0.7 was found on two
busy cores), so that single steps are no independent samples; the differences within rounds showed none.
"""


def compare(job: RankJob, log: RankLog, rounds: int) -> dict[str, Any]:
    """A rank's whole life. Every rank has the same results: those of the slowest rank."""
    with log.during("compare"):
        device, cell = join(job), job.cell
        strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
        with strategy.install() as wiring:
            kinds = Kinds(Train(Rank(strategy, wiring, device, log.step)))
            _round(kinds, 0)  # pays for all that happens only once
            collectives = kinds.collectives()
            found = [_round(kinds, number) for number in range(rounds)]
    return {
        "collectives": collectives,
        "log_ratios": [timed - bare for bare, timed in found],
        "bare_ms": [math.exp(bare) for bare, _ in found],
    }


def _round(kinds: Kinds, number: int) -> tuple[float, float]:
    """The means of the logarithms of milliseconds of bare and of timed steps, all on the same data.

    Every other round exchanges the two kinds: a round's first step finds colder caches than the others.
    """
    exchanged = number % 2
    order = [int(place) ^ exchanged for place in ORDER]
    took_ms = []
    for is_timed in order:
        dist.barrier()
        took_ms.append(kinds.harness(number) if is_timed else kinds.bare(number))
    slowest_ms = torch.tensor(took_ms, dtype=torch.float64)
    dist.all_reduce(slowest_ms, op=dist.ReduceOp.MAX)
    logs = [*zip(order, slowest_ms.log().tolist(), strict=True)]
    bare, timed = (fmean(log for is_timed, log in logs if is_timed == kind) for kind in (0, 1))
    return bare, timed
