"""How often identical cells are called different, and a slower one is found: by the records of many repeats.

`python -m analysis.false_differences FOLDER...`; exits 1 where it is too often, or too seldom.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from analysis.cells.difference import Processes, difference, processes_of
from analysis.cells.summary import summarise
from analysis.frame.archive import read_archive
from analysis.frame.load import peak_flops_per_s
from analysis.labels import count_label, percent_label
from bench.command import sweep_words, tool_words
from bench.config import ConfigError, ExitCode
from bench.record import Provenance
from bench.statistics import (
    MAX_PROCESSES,
    MIN_PROCESSES,
    TOLD_RATIO,
    enough_processes,
    pooled_spread,
    share_interval,
)
from bench.store import StoreError

MAX_FALSE_SHARE = 0.05
MIN_FOUND_SHARE = 0.80
MIN_COMPARISONS = 200
SEED = 0
ENOUGH = "-m seq_len=1k strategy=local,ulysses,ring measure.repeats=60 measure.steps=10 measure.trace=false"
NOTE = (
    "Each comparison is of processes of one cell that ran one after another: rounds of two, of which chance"
    " gives each side one, as many as measure.repeats=auto would have chosen. Comparisons overlap, so their"
    " intervals are somewhat too narrow."
)


@dataclass(frozen=True, slots=True)
class Trials:
    """What became of comparisons of identical processes."""

    n: int
    claimed: int
    """How many were told apart as they are."""
    found: int
    """How many once one side's times had been multiplied by TOLD_RATIO."""
    processes: tuple[int, ...] = ()
    """Of each side, in each comparison."""


def trials(cells: Sequence[Processes], n: int, seed: int = SEED) -> Trials:
    """Compare processes with identical ones n times, as many of each side as their spread asks for.

    Each cell has at least twice MIN_PROCESSES, in order of time.
    """
    numbers, claimed, found, processes = random.Random(seed), 0, 0, list[int]()
    for _ in range(n):
        one, other = _enough(*_sides(numbers.choice(cells), numbers))
        slowed = replace(other, tokens_per_s=tuple(rate / TOLD_RATIO for rate in other.tokens_per_s))
        as_it_is = difference(one, other)
        claimed += as_it_is.is_faster or as_it_is.is_slower
        found += difference(one, slowed).is_faster
        processes.append(len(one))
    return Trials(n, claimed, found, tuple(processes))


def _enough(one: Processes, other: Processes) -> tuple[Processes, Processes]:
    """The first of each side, by the spread of the first MIN_PROCESSES as many as a sweep chooses."""
    sides = (one.first(MIN_PROCESSES), other.first(MIN_PROCESSES))
    enough = enough_processes(pooled_spread(side.tokens_per_s for side in sides))
    return one.first(enough), other.first(enough)


def missed_goals(result: Trials) -> list[str]:
    """What of the goals is missed: too many false differences beyond chance, or too few true ones found."""
    missed = []
    if share_interval(result.claimed, result.n).low > MAX_FALSE_SHARE:
        missed.append(f"identical cells should differ in at most {MAX_FALSE_SHARE:.0%} of comparisons")
    if result.found / result.n < MIN_FOUND_SHARE:
        missed.append(f"a slowdown by {TOLD_RATIO - 1:.0%} should be found in at least {MIN_FOUND_SHARE:.0%}")
    return missed


def _way_out() -> str:
    return f"run for example: {sweep_words()} {ENOUGH}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; the exit code."""
    parser = argparse.ArgumentParser(prog=tool_words("analysis.false_differences"), description=__doc__)
    parser.add_argument(
        "folders", nargs="+", type=Path, metavar="FOLDER", help=f"a sweep's folder; {_way_out()}"
    )
    parser.add_argument("--comparisons", type=int, default=1000, help=f"at least {MIN_COMPARISONS}")
    chosen = parser.parse_args(arguments)
    try:
        _refuse_few(chosen.comparisons)
        cells = _repeated_cells(read_archive(chosen.folders, peak_flops_per_s()).frame)
    except (StoreError, ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return ExitCode.REQUEST_WRONG
    result = trials(cells, chosen.comparisons)
    _print(result, cells)
    missed = missed_goals(result)
    print("missed: " + "; ".join(missed) if missed else "all goals met")
    return ExitCode.FAILED if missed else ExitCode.OK


def _print(result: Trials, cells: Sequence[Processes]) -> None:
    processes = count_label(sum(map(len, cells)), "process", "processes")
    low, middle, high = min(result.processes), statistics.median(result.processes), max(result.processes)
    sides = f"{result.n:,} comparisons of {low} to {high} processes of each side, {middle:g} in the middle"
    print(f"{processes} of {count_label(len(cells), 'cell')}, {sides}; share and its 95 % interval")
    print(f"  spread between processes, at the most  {percent_label(max(map(_spread, cells)))}")
    print(f"  identical cells called different      {_share(result.claimed, result.n)}")
    print(f"  found when {TOLD_RATIO - 1:.0%} slower by arithmetic   {_share(result.found, result.n)}")
    print(NOTE)


def _spread(cell: Processes) -> float:
    """Interquartile range over median."""
    low, middle, high = statistics.quantiles(cell.tokens_per_s, n=4)
    return (high - low) / middle


def _refuse_few(comparisons: int) -> None:
    if comparisons < MIN_COMPARISONS:
        raise ConfigError(f"--comparisons={comparisons}: must be at least {MIN_COMPARISONS}")


def _repeated_cells(frame: pd.DataFrame) -> list[Processes]:
    """The measured processes of every cell that has enough of them; raises ConfigError where none has."""
    measured = frame[frame["provenance"] == Provenance.MEASURED].reset_index(drop=True)
    cells = [*_in_time(measured)] if len(measured) else []
    enough = [cell for cell in cells if len(cell) >= 2 * MIN_PROCESSES]
    if not enough:
        most = max(map(len, cells), default=0)
        raise ConfigError(
            f"no cell has more than {most} measured processes: takes {2 * MIN_PROCESSES} of one; {_way_out()}"
        )
    return enough


def _in_time(frame: pd.DataFrame) -> Iterator[Processes]:
    """Per cell its processes in the order in which they started."""
    processes = summarise(frame.sort_values(["started_at", "order"]).reset_index(drop=True)).processes
    for _, its in processes.groupby(level=0):
        yield processes_of(its)


def _sides(cell: Processes, numbers: random.Random) -> tuple[Processes, Processes]:
    """Two sides of MAX_PROCESSES, or of half of what there is, as a sweep runs two cells that it repeats."""
    of_each = min(MAX_PROCESSES, len(cell) // 2)
    first = numbers.randrange(len(cell) - 2 * of_each + 1)
    pairs = [numbers.sample((place, place + 1), 2) for place in range(first, first + 2 * of_each, 2)]
    one, other = (cell.at(side) for side in zip(*pairs, strict=True))
    return one, other


def _share(hits: int, n: int) -> str:
    interval = share_interval(hits, n)
    return f"{percent_label(hits / n)} ({percent_label(interval.low)} to {percent_label(interval.high)})"


if __name__ == "__main__":
    sys.exit(main())
