"""Peak memory of replayed ranks next to that of real ranks, on CPU: the table of docs/replay.md.

    python -m tests.benchmarks.replay_memory [STRATEGY ...]

Prints Markdown: a row for each strategy and number of ranks, and a column for each engine with the peaks of
the first and the last rank. Exits 1 if a replayed peak differs by more than NOISE_BYTES.
"""

import itertools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.request.legality import refusal
from bench.run.cell.launcher import Launcher
from bench.run.node.local import LocalNode
from bench.strategies import STRATEGIES
from tests.support.cells import INSTALLED, NEED_ALL_RANKS, make_cell, words_for

ENGINES, RANKS = ("zero3", "fsdp2", "ddp"), (2, 4)
NOISE_BYTES = 128
"""Usual difference between the peaks of two runs of real ranks."""
REAL_RUNS = 3
"""Largest number of runs of the real cell, which runs again if the replay differs.

Some runs hold one more buffer, probably because gloo frees tensors late.
"""
CELL = (
    "seq_len=2k", "checkpointing=true", "measure.steps=1", "measure.warmup_steps=1", "measure.budget_s=100",
    "measure.trace=false", "measure.repeats=1", "measure.reference_budget_s=0",
)  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """Peak memory and payload bytes of one rank."""

    steady: int
    whole_life: int
    sent_bytes: dict[str, int]
    calls: dict[str, int]

    @classmethod
    def of_report(cls, report):
        memory, engagement = report["memory"], report["engagement"]
        sent = {purpose: sizes[0] for purpose, sizes in engagement["sent_bytes"].items()}
        steady, life = memory["peak_allocated_bytes"][0], memory["whole_life_allocated_bytes"][0]
        return cls(steady, life, sent, engagement["calls"])


def peaks_of(launcher, folder, words):
    """Return the peaks by rank, or a text: why the cell is not legal, or how it failed."""
    cell = make_cell(*words)
    if (reason := refusal(cell)) is not None:
        return reason
    ends = launcher.run(cell, folder, skipped_passes=frozenset(NEED_ALL_RANKS))
    failed = [end.failure or {"message": end.log_tail} for end in ends if end.report is None]
    return failed[0]["message"] if failed else {end.rank: Peaks.of_report(end.report) for end in ends}


@dataclass(frozen=True)
class PeakComparison:
    """Peaks of a replayed rank and of the real rank's runs, the nearest run first."""

    real: list[Peaks]
    replayed: Peaks

    @classmethod
    def of_runs(cls, real, replayed):
        return cls(sorted(real, key=lambda peaks: abs(peaks.steady - replayed.steady)), replayed)

    @property
    def difference(self):
        """Bytes of the replayed peak less the nearest real peak."""
        return self.replayed.steady - self.real[0].steady

    @property
    def sends_other_bytes(self):
        """Whether attention sends other bytes than the real rank over gloo."""
        return self.replayed.sent_bytes.get("attention") != self.real[0].sent_bytes.get("attention")

    @property
    def text(self):
        """Nearest real peak and the difference to it, such as `2,436,725 =`."""
        nearest, runs = self.real[0], len(self.real)
        texts = [f"{nearest.steady:,}", f"{self.difference:+,}" if self.difference else "="]
        if runs > 1:
            texts.append(f"({runs} runs)")
        if self.replayed.whole_life - nearest.whole_life != self.difference:
            texts.append(f"(whole life {self.replayed.whole_life - nearest.whole_life:+,})")
        return " ".join(texts)


def compare(launcher, folder, words, ranks):
    """Return the comparison of one cell by rank, or for all ranks a text that states why there is none."""
    replayed, real = {}, []
    for rank in ranks:
        found = peaks_of(launcher, folder / str(rank), [*words, "mode=replay", f"replay.rank={rank}"])
        if isinstance(found, str):
            return dict.fromkeys(ranks, found)
        replayed[rank] = found[rank]
    while len(real) < REAL_RUNS:
        found = peaks_of(launcher, folder / f"real-{len(real)}", words)
        if isinstance(found, str):
            return dict.fromkeys(ranks, found)
        real.append(found)
        comparisons = {
            rank: PeakComparison.of_runs([run[rank] for run in real], replayed[rank]) for rank in ranks
        }
        if not any(comparison.difference for comparison in comparisons.values()):
            break
    return comparisons


def words_of(strategy, ranks, engine):
    """Return the options of the cell that is compared."""
    placement = (f"cluster.world_size={ranks}", f"engine={engine}")
    return [f"strategy={strategy}", *words_for(strategy), *placement, *CELL]


def rows(launcher, folder, strategies):
    """Yield strategy, number of ranks, and the result of `compare` by engine and rank."""
    for strategy, count in itertools.product(strategies, RANKS):
        by_engine = {
            engine: compare(
                launcher,
                folder / f"{strategy}-{count}-{engine}",
                words_of(strategy, count, engine),
                (0, count - 1),
            )
            for engine in ENGINES
        }
        yield strategy, count, by_engine


def main():
    strategies = sys.argv[1:] or [name for name in INSTALLED if STRATEGIES[name].shares_sequences]
    comparisons = {}
    print(f"| strategy | ranks | {' | '.join(ENGINES)} |", f"|{' --- |' * (2 + len(ENGINES))}", sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        for strategy, count, by_engine in rows(Launcher([LocalNode()]), Path(folder), strategies):
            texts = [
                ", ".join(result if isinstance(result, str) else result.text for result in by_rank.values())
                for by_rank in by_engine.values()
            ]
            print(f"| `{strategy}` | {count} | {' | '.join(texts)} |", flush=True)
            comparisons.setdefault(strategy, []).extend(
                result
                for by_rank in by_engine.values()
                for result in by_rank.values()
                if not isinstance(result, str)
            )
    every = [comparison for of_strategy in comparisons.values() for comparison in of_strategy]
    equal = [comparison for comparison in every if not comparison.difference]
    different = [
        name
        for name, of_strategy in comparisons.items()
        if any(comparison.sends_other_bytes for comparison in of_strategy)
    ]
    print(f"\n{len(equal)} of {len(every)} peaks are equal to the byte.")
    print(f"Attention sends other bytes than over gloo: {', '.join(different) or 'none'}.")
    return int(any(abs(comparison.difference) > NOISE_BYTES for comparison in every))


if __name__ == "__main__":
    sys.exit(main())
