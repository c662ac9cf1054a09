"""Peak memory of replayed ranks next to that of real ranks, on CPU: the table of docs/replay.md.

    python -m tests.benchmarks.replay_memory [STRATEGY ...]

Prints Markdown: a row for each strategy and number of ranks, a column for each engine, in it the peaks of the
first and the last rank. Exits 1 where a peak is further off than NOISE_BYTES.
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
"""Peaks of real ranks often differ by so much from one run to the next."""
REAL_RUNS = 3
"""How often the real cell runs where the replay is not equal to it: some runs hold a buffer more, we guess
because gloo frees tensors late."""
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
    def of(cls, report):
        memory, engagement = report["memory"], report["engagement"]
        sent = {purpose: sizes[0] for purpose, sizes in engagement["sent_bytes"].items()}
        steady, life = memory["peak_allocated_bytes"][0], memory["whole_life_allocated_bytes"][0]
        return cls(steady, life, sent, engagement["calls"])


def peaks_of(launcher, folder, words):
    """By rank what every running rank of the cell held; or why the cell is not legal, or how it ended."""
    cell = make_cell(*words)
    if (reason := refusal(cell)) is not None:
        return reason
    ends = launcher.run(cell, folder, known=frozenset(NEED_ALL_RANKS))
    failed = [end.failure or {"message": end.log_tail} for end in ends if end.report is None]
    return failed[0]["message"] if failed else {end.rank: Peaks.of(end.report) for end in ends}


@dataclass(frozen=True)
class Compared:
    """A replayed rank and the runs of the real one, the nearest first."""

    real: list[Peaks]
    replayed: Peaks

    @classmethod
    def of(cls, real, replayed):
        return cls(sorted(real, key=lambda each: abs(each.steady - replayed.steady)), replayed)

    @property
    def difference(self):
        """Bytes between the replayed peak and the nearest of the real ones."""
        return self.replayed.steady - self.real[0].steady

    @property
    def sends_otherwise(self):
        """Whether the package sends other bytes than over gloo."""
        return self.replayed.sent_bytes.get("attention") != self.real[0].sent_bytes.get("attention")

    @property
    def text(self):
        """`2,436,725 =`, or how far the replayed peak is from the nearest of several runs."""
        nearest, runs = self.real[0], len(self.real)
        texts = [f"{nearest.steady:,}", f"{self.difference:+,}" if self.difference else "="]
        if runs > 1:
            texts.append(f"({runs} runs)")
        if self.replayed.whole_life - nearest.whole_life != self.difference:
            texts.append(f"(whole life {self.replayed.whole_life - nearest.whole_life:+,})")
        return " ".join(texts)


def compare(launcher, folder, words, ranks):
    """By rank the real and the replayed peaks of one cell, or a text that says why there are none."""
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
        compared = {rank: Compared.of([run[rank] for run in real], replayed[rank]) for rank in ranks}
        if not any(each.difference for each in compared.values()):
            break
    return compared


def words_of(strategy, ranks, engine):
    """The cell that is compared."""
    where = (f"cluster.world_size={ranks}", f"engine={engine}")
    return [f"strategy={strategy}", *words_for(strategy), *where, *CELL]


def rows(launcher, folder, strategies):
    """For each strategy and number of ranks what `compare` found, by engine and rank."""
    for strategy, count in itertools.product(strategies, RANKS):
        found = {
            engine: compare(
                launcher,
                folder / f"{strategy}-{count}-{engine}",
                words_of(strategy, count, engine),
                (0, count - 1),
            )
            for engine in ENGINES
        }
        yield strategy, count, found


def main():
    strategies = sys.argv[1:] or [name for name in INSTALLED if STRATEGIES[name].shares_sequences]
    compared = {}
    print(f"| strategy | ranks | {' | '.join(ENGINES)} |", f"|{' --- |' * (2 + len(ENGINES))}", sep="\n")
    with tempfile.TemporaryDirectory() as folder:
        for strategy, count, found in rows(Launcher([LocalNode()]), Path(folder), strategies):
            texts = [
                ", ".join(each if isinstance(each, str) else each.text for each in by_rank.values())
                for by_rank in found.values()
            ]
            print(f"| `{strategy}` | {count} | {' | '.join(texts)} |", flush=True)
            made = [
                each for by_rank in found.values() for each in by_rank.values() if not isinstance(each, str)
            ]
            compared.setdefault(strategy, []).extend(made)
    every = [each for of_strategy in compared.values() for each in of_strategy]
    equal = [each for each in every if not each.difference]
    otherwise = [name for name, its in compared.items() if any(each.sends_otherwise for each in its)]
    print(f"\n{len(equal)} of {len(every)} peaks are equal to the byte.")
    print(f"Attention sends other bytes than over gloo: {', '.join(otherwise) or 'none'}.")
    return int(any(abs(each.difference) > NOISE_BYTES for each in every))


if __name__ == "__main__":
    sys.exit(main())
