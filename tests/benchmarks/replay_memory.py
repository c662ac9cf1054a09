"""Peak memory of replayed ranks next to that of real ranks, on CPU: the table of docs/replay.md.

    python -m tests.benchmarks.replay_memory [STRATEGY ...]

Prints Markdown, a row for each strategy, number of ranks and rank, a column for each engine; exits 1 where a
peak is further off than NOISE_BYTES.
"""

import itertools
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.cell.launcher import Launcher
from bench.node.local import LocalNode
from bench.request.legality import refusal
from bench.strategies import STRATEGIES
from tests.cells import NEED_ALL_RANKS, make_cell, words_for
from tests.installed import INSTALLED

ENGINES, RANKS = ("zero3", "fsdp2", "ddp"), (2, 4)
NOISE_BYTES = 128
"""Peaks of real ranks differ by so much from one run to the next: gloo frees its tensors at its own pace."""
CELL = (
    "seq_len=2k", "checkpointing=true", "measure.steps=1", "measure.warmup_steps=1", "measure.budget_s=100",
    "measure.trace=false", "measure.repeats=1", "measure.reference_budget_s=0",
)  # fmt: skip


@dataclass(frozen=True)
class Peaks:
    """What one rank held and sent."""

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


def compare(launcher, folder, words, ranks):
    """By rank the real and the replayed peaks of one cell, or a text that says why there are none."""
    real = peaks_of(launcher, folder / "real", words)
    if isinstance(real, str):
        return dict.fromkeys(ranks, real)
    found = {}
    for rank in ranks:
        replayed = peaks_of(launcher, folder / str(rank), [*words, "mode=replay", f"replay.rank={rank}"])
        found[rank] = replayed if isinstance(replayed, str) else (real[rank], replayed[rank])
    return found


def text_of(pair):
    """`2,436,725 =`, or the difference of the replayed peak."""
    if isinstance(pair, str):
        return f"- {pair.splitlines()[0][:120]}"
    real, replayed = pair
    texts = [f"{real.steady:,}", difference(real.steady, replayed.steady)]
    if real.whole_life != replayed.whole_life:
        texts.append(f"(whole life {difference(real.whole_life, replayed.whole_life)})")
    sent, replayed_sent = real.sent_bytes.get("attention", 0), replayed.sent_bytes.get("attention", 0)
    if sent != replayed_sent:
        texts.append(f"(attention sends {sent:,} and {replayed_sent:,})")
    return " ".join(texts)


def difference(real, replayed):
    return "=" if real == replayed else f"{replayed - real:+,}"


def words_of(strategy, ranks, engine):
    """The cell that is compared."""
    choices = (
        f"strategy={strategy}",
        *words_for(strategy),
        f"cluster.world_size={ranks}",
        f"engine={engine}",
    )
    return [*choices, *CELL]


def main():
    strategies = sys.argv[1:] or [name for name in INSTALLED if STRATEGIES[name].shares_sequences]
    launcher, off = Launcher([LocalNode()]), 0
    print(
        f"| strategy | ranks | rank | {' | '.join(ENGINES)} |", "| --- " * (3 + len(ENGINES)) + "|", sep="\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        for strategy, count in itertools.product(strategies, RANKS):
            ranks = (0, count - 1)
            columns = [
                compare(
                    launcher,
                    Path(folder) / f"{strategy}-{count}-{engine}",
                    words_of(strategy, count, engine),
                    ranks,
                )
                for engine in ENGINES
            ]
            for rank in ranks:
                pairs = [column[rank] for column in columns]
                print(f"| `{strategy}` | {count} | {rank} | {' | '.join(map(text_of, pairs))} |", flush=True)
                both = [pair for pair in pairs if not isinstance(pair, str)]
                off += sum(abs(real.steady - replayed.steady) > NOISE_BYTES for real, replayed in both)
    return int(off > 0)


if __name__ == "__main__":
    sys.exit(main())
