"""Ratio of a replayed rank's compute time to that of the real rank, on CPU: the numbers of docs/replay.md.

    python -m tests.benchmarks.replay_time [STRATEGY ...]

Two ranks use one core each; run nothing else at the same time. Real and replayed cells are interleaved, and
every cell runs in a fresh process. Compute of a step is the CPU time of the rank's main thread, which
excludes copies of gloo, because gloo copies in its own threads.
"""

import sys
import tempfile
from pathlib import Path
from statistics import median

from bench.common.statistics import ratio_interval
from bench.run.cell.launcher import Launcher
from bench.run.node.local import LocalNode
from tests.benchmarks.timed_rank import STEPS, time_steps
from tests.support.cells import make_cell

STRATEGIES_COMPARED = ("ulysses", "ring", "deepspeed_ulysses", "ring_flash_attn")
PROCESSES = 8
CELL = ("cluster.world_size=2", "cluster.threads_per_rank=1", "seq_len=8k", "measure.reference_budget_s=0")
GOAL = 0.05
"""Largest distance of the ratio from 1."""


def compute_ms(launcher, folder, words):
    """Return the compute milliseconds of the median step of rank 0."""
    first = launcher.run(make_cell(*CELL, *words), folder, entry=time_steps)[0]
    assert first.report is not None, first.failure or first.log_tail
    return median(first.report["compute_ms"])


def row_of(strategy, real, replayed):
    """Return the line of the table, and whether the ratio is within the goal."""
    ratio, interval = ratio_interval(replayed, real)
    texts = (f"`{strategy}`", f"{median(real):.0f}", f"{median(replayed):.0f}", f"{ratio:.3f}")
    return f"| {' | '.join(texts)} | {interval.low:.3f} to {interval.high:.3f} |", abs(ratio - 1) <= GOAL


def main():
    launcher, are_met = Launcher([LocalNode()]), []
    print(
        "| strategy | real, ms | replayed, ms | replayed / real | 95 % interval |",
        f"|{' --- |' * 5}",
        sep="\n",
    )
    with tempfile.TemporaryDirectory() as folder:
        for strategy in sys.argv[1:] or STRATEGIES_COMPARED:
            real, replayed = [], []
            for number in range(PROCESSES):
                words, place = [f"strategy={strategy}"], Path(folder) / f"{strategy}-{number}"
                real.append(compute_ms(launcher, place / "real", words))
                replayed.append(
                    compute_ms(launcher, place / "replay", [*words, "mode=replay", "replay.rank=0"])
                )
            line, is_met = row_of(strategy, real, replayed)
            are_met.append(is_met)
            print(line, flush=True)
    answer = "yes" if all(are_met) else "no"
    print(f"{PROCESSES} processes a side, {STEPS} steps each; within {GOAL:.0%}: {answer}")
    return int(not all(are_met))


if __name__ == "__main__":
    sys.exit(main())
