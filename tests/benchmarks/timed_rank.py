"""Entry point of the ranks of replay_time, in a module that the fork server can import."""

import time

from bench.measure.workloads import load_workload_class
from bench.measure.workloads.workload import WorkloadRank
from bench.ranks.groups import make_groups
from bench.run.node.worker import join
from bench.strategies import STRATEGIES, load_strategy_class

STEPS = 3


def time_steps(job, log):
    """Return the main-thread CPU milliseconds of all full-length steps but the first, on a rank."""
    device, cell = join(job), job.cell
    strategy = load_strategy_class(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
    with strategy.install() as wiring:
        workload = load_workload_class(cell.workload.name)(WorkloadRank(strategy, wiring, device, log.step))
        workload.short_step()
        times_ms = []
        for number in range(1 + STEPS):
            before = time.thread_time()
            workload.step(number)
            times_ms.append((time.thread_time() - before) * 1e3)
    return {"compute_ms": times_ms[1:]}
