"""Compute time of a replayed rank over that of the real rank, on CPU: the figures of docs/replay.md.

    python -m tests.benchmarks.replay_time [STRATEGY ...]

Two ranks with one core each, so nothing else should run. Real and replayed cells are interleaved, each in a
fresh process. A step's compute is the CPU time of the rank's main thread: gloo copies in threads of its own.
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
"""How far the ratio may be from 1."""


def compute_ms(launcher, folder, words):
    """The median step of rank 0."""
    first = launcher.run(make_cell(*CELL, *words), folder, entry=time_steps)[0]
    assert first.report is not None, first.failure or first.log_tail
    return median(first.report["compute_ms"])


def row_of(strategy, real, replayed):
    """The line of the table, and whether it is within the goal."""
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
