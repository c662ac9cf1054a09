"""Time of a step under the harness over that of a bare loop, on two CPU ranks.

    python -m tests.benchmarks.overhead [WORD ...]

Bare and timed steps are interleaved in one set of processes, on one model, optimizer and data. Prints the
ratio with its 95 % interval, and the number of collective calls of both kinds of step. Exits 1 if the
interval lies outside of 1.00 +-MARGIN or the numbers of calls differ. Run nothing else at the same time.
"""

import math
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean

import torch
import torch.distributed as dist

from bench.attention.watch import AttentionWatch
from bench.common.statistics import SIGNIFICANCE_LEVEL, Interval
from bench.config import LeasePolicy
from bench.measure.tap import CommunicationTap
from bench.measure.timing.clock import StepClock
from bench.measure.workloads.train import TrainWorkload
from bench.measure.workloads.workload import WorkloadRank
from bench.ranks.groups import make_groups
from bench.run.cell.launcher import Launcher
from bench.run.node.lease import lease
from bench.run.node.worker import join
from bench.strategies import STRATEGIES, load_strategy_class
from bench.strategies.strategy import IGNORED_LABEL
from bench.training.data import InputDigest
from tests.support.cells import make_cell

CELL = ("seq_len=1k", "cluster.world_size=2", "engine=ddp")
"""Options of the cell. Short steps show a fixed cost best; they are noisier, but more of them fit a
minute."""
ROUNDS = 60
MARGIN = 0.02
"""Largest distance of the ratio from 1.00, and largest half-width of an interval that confirms it."""
ORDER = "0110100110010110"
"""One round of bare steps (0) and timed steps (1) in the order of Thue and Morse.

A drift over the round cancels if it is a polynomial of degree three at most. Neighbouring steps are
correlated (lag 1: 0.4 to 0.7 on two busy cores), so a sample is a round, not a step.
"""


class UnseenTokens(InputDigest):
    """Digest of tokens that stays empty, because a bare step has none."""

    def add(self, input_ids, labels, position_ids):
        pass


@dataclass(frozen=True)
class Steps:
    """Timed and bare steps on one workload."""

    workload: TrainWorkload

    def timed_ms(self, step, number):
        start = time.perf_counter()
        step(number)
        return (time.perf_counter() - start) * 1e3

    def timed(self, number):
        """Take a step of the timed pass, its marks of the clock included."""
        clock = StepClock(self.workload.rank.device)
        clock.mark()
        self.workload.step(number)
        clock.mark()

    def bare(self, number):
        """Take the step that a user writes by hand, with the model, strategy and data of the harness."""
        rank, cell, engine = self.workload.rank, self.workload.cell, self.workload.optimizer
        groups = rank.strategy.groups
        recorded, engine.model.input_digest = engine.model.input_digest, UnseenTokens()
        whole = self.workload.trainer.data.micro_batch(number, 0, groups.data_rank, cell.padded_len)
        batch = rank.strategy.shard(whole)
        valid = (batch.labels != IGNORED_LABEL).sum()
        dist.all_reduce(valid)
        with engine.autocast:
            loss_sum = engine.module(batch.input_ids, batch.labels, batch.position_ids)
            (loss_sum * (groups.world_size / valid)).backward()
        torch.nn.utils.clip_grad_norm_(engine.model.parameters(), cell.optimizer.max_grad_norm)
        engine.updater.optimizer.step()
        engine.updater.schedule.step()
        engine.updater.optimizer.zero_grad()
        engine.model.input_digest = recorded

    def calls(self, step):
        """Return the number of collective calls of a step."""
        tap = CommunicationTap(AttentionWatch())
        with tap:
            step(0)
        return len(tap.calls)

    def round(self, number):
        """Return the mean logarithms of milliseconds of bare and of timed steps, on the slowest rank.

        Every other round exchanges the two kinds: a round's first step finds colder caches than the others.
        """
        order = [int(place) ^ number % 2 for place in ORDER]
        times_ms = []
        for is_timed in order:
            dist.barrier()
            times_ms.append(self.timed_ms(self.timed if is_timed else self.bare, number))
        slowest_ms = torch.tensor(times_ms, dtype=torch.float64)
        dist.all_reduce(slowest_ms, op=dist.ReduceOp.MAX)
        logs = [*zip(order, slowest_ms.log().tolist(), strict=True)]
        return [fmean(log for is_timed, log in logs if is_timed == kind) for kind in (0, 1)]


def compare(job, log, rounds):
    """Compare the steps on a rank; all ranks return the times of the slowest rank."""
    with log.run_phase("compare"):
        device, cell = join(job), job.cell
        strategy = load_strategy_class(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
        with strategy.install() as wiring:
            steps = Steps(TrainWorkload(WorkloadRank(strategy, wiring, device, log.step)))
            steps.round(0)  # includes one-time costs
            calls = {"bare": steps.calls(steps.bare), "timed": steps.calls(steps.timed)}
            logs = [steps.round(number) for number in range(rounds)]
    return {
        "calls": calls,
        "log_ratios": [timed - bare for bare, timed in logs],
        "bare_ms": [math.exp(bare) for bare, _ in logs],
    }


def measure_overhead(cell, launcher, rounds=ROUNDS, entry=compare):
    """Return the report of `compare`, run by the ranks of a cell."""
    with tempfile.TemporaryDirectory() as folder:
        first = launcher.run(cell, Path(folder), entry=partial(entry, rounds=rounds))[0]
    assert first.report is not None, first.failure or first.log_tail
    return first.report


def signed_rank(n):
    """Return the k for which [k-th smallest, k-th largest] of the means of all pairs covers the centre.

    The interval covers the centre of n symmetric samples in at least 95 % of cases. k is 0 for fewer than six
    samples. It comes from the normal approximation of Wilcoxon's statistic, rounded down, which gives the
    exact interval or a slightly wider one.
    """
    pairs = n * (n + 1) / 2
    deviation = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    return max(
        0, math.floor(pairs / 2 - statistics.NormalDist().inv_cdf(1 - SIGNIFICANCE_LEVEL / 2) * deviation)
    )


def centre_interval(samples):
    """Return the centre of six or more symmetric samples and its 95 % interval.

    The centre is the median of the means of all pairs (J. L. Hodges and E. L. Lehmann, 1963); the interval
    inverts the signed-rank test (F. Wilcoxon, 1945). Rounds are symmetric: if the two kinds of step differ by
    a factor, exchanging them turns a round's deviation into its negative.
    """
    means = sorted((one + other) / 2 for i, one in enumerate(samples) for other in samples[: i + 1])
    k = signed_rank(len(samples))
    return statistics.median(means), Interval(low=means[k - 1], high=means[-k])


def verdict(found):
    """Return the lines to print, and the goals that are missed."""
    calls, (centre, logs) = found["calls"], centre_interval(found["log_ratios"])
    low, high = math.exp(logs.low), math.exp(logs.high)
    ratio = f"{math.exp(centre):.3f} ({low:.3f} to {high:.3f}), n={len(found['log_ratios'])} rounds"
    missed = []
    if calls["timed"] != calls["bare"]:
        missed.append(f"a timed step should make {calls['bare']} collective calls, not {calls['timed']}")
    if low > 1 + MARGIN or high < 1 - MARGIN:
        missed.append(f"a timed step takes {ratio}; it should take 1.00 +-{MARGIN}")
    width = f"the interval is +-{(high - low) / 2:.3f}, wider than +-{MARGIN}"
    noisy = f"too noisy here: {width}; run it where nothing else runs"
    met = noisy if high - low > 2 * MARGIN else "all goals met"
    return [
        f"  bare loop          {statistics.median(found['bare_ms']):.1f} ms",
        f"  a timed step       {ratio}",
        f"  collective calls   {calls['timed']}, in a bare step {calls['bare']}",
        f"missed: {'; '.join(missed)}" if missed else met,
    ], missed


def main():
    from tests.benchmarks.overhead import compare as entry  # ranks cannot import it from `__main__`

    cell = make_cell(*sys.argv[1:], *CELL)
    with lease((), LeasePolicy.WAIT, print):
        lines, missed = verdict(measure_overhead(cell, Launcher(), entry=entry))
    print(f"a step, {cell.strategy} ddp, {cell.seq_len} tokens, 2 CPU ranks, against a bare loop's")
    print(*lines, sep="\n")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
