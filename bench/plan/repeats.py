"""How often cells run: interleaved, and with `measure.repeats=auto` as often as a budget of time allows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.common.labels import duration_label, length_label
from bench.common.statistics import MIN_PROCESSES, SPARE, enough_processes, pooled_spread, slowest_median
from bench.config import AUTO, Cell
from bench.plan.cell_labels import CellLabels
from bench.plan.work import REFERENCE_STRATEGY
from bench.record.record import Record, Status
from bench.strategies import STRATEGIES

Turn = tuple[Cell, int]
"""A cell and its repeat, from 0."""
NOT_COMPARED = frozenset(
    {
        *("strategy", "options", "layout", "kernel", "sp_degree", "ulysses_degree", "dp_replicate"),
        *("dp_shard", "batch", "grad_accum", "cluster", "seed", "padding", "trainer", "loss"),
        *("measure", "env", "replay"),
    }
)
"""Fields in which cells may differ whose speeds are compared, as in `analysis.cells.comparison`."""
ROUNDED_S = 100


@dataclass(frozen=True, slots=True)
class Process:
    """One process of a cell."""

    wall_s: float
    tokens_per_s: float | None
    """None where it failed."""


Processes = Mapping[str, Sequence[Process]]
"""The processes of each cell so far, by the cell's id."""


@dataclass(frozen=True, slots=True)
class Repeats:
    """Further processes of the two fastest cells of one kind of work."""

    cells: tuple[Cell, Cell]
    has: int
    """Processes that each of them has."""
    lacks: int
    """Processes that each still needs."""
    gets: int
    """Processes that each gets within the budget."""
    lacks_s: float
    """Seconds of all that they still need."""
    gets_s: float
    """Seconds of what they get."""

    @property
    def seq_len(self) -> int:
        return self.cells[0].seq_len

    @property
    def turns(self) -> list[Turn]:
        """Return the processes in the order in which they run."""
        return in_turns(self.cells, range(self.has, self.has + self.gets))


def in_turns(cells: Sequence[Cell], repeats: Iterable[int]) -> list[Turn]:
    """Return each of these repeats of every cell before any cell's next one.

    A sweep that is interrupted thus has equally many of all. The first repeats go from short to long, at each
    length `local` before the others, which are compared with it. The cells of later ones are shuffled by the
    seed: heat, and whatever else changes slowly, favours no cell.
    """
    seed = min((cell.seed for cell in cells), default=0)
    first = sorted(cells, key=lambda cell: (cell.seq_len, cell.strategy != REFERENCE_STRATEGY))
    return [
        (cell, repeat)
        for repeat in repeats
        for cell in (random.Random(f"{seed} {repeat}").sample(cells, len(cells)) if repeat else first)
    ]


def least_repeats(cell: Cell) -> int:
    """Return how often a cell runs whatever it takes."""
    return 1 if cell.measure.repeats == AUTO else cell.measure.repeats


def processes_of(records: Iterable[Record]) -> Processes:
    """Return the processes of each cell in the order of their repeats."""
    found: dict[str, list[Process]] = {}
    for record in sorted(records, key=lambda record: record.repeat):
        speed, timing = None, record.timing
        if record.status is Status.OK and timing is not None:
            speed = 1e3 * timing.tokens_per_step / slowest_median(timing.step_times_ms)
        found.setdefault(record.cell_id, []).append(Process(record.wall_s, speed))
    return found


def choose(cells: Iterable[Cell], ran: Processes, left_s: float) -> list[Repeats]:
    """Return the repeats of each kind of work that lacks some, the longest sequences first.

    Each kind takes what it lacks of `left_s` seconds before the next one does. The processes up to
    MIN_PROCESSES come all together or not at all. How many come after them follows from how far the first
    ones spread, never from how far the two cells are apart: a test that stops once it likes the difference
    claims one too often.
    """
    pairs = sorted(_fastest_pairs(cells, ran), key=lambda pair: pair[0].seq_len, reverse=True)
    found = []
    for pair in pairs:
        processes = [ran[cell.cell_id] for cell in pair]
        has = min(map(len, processes))
        lacks = max(0, _enough(processes) - has)
        takes_s = [_seconds(processes, has + more) for more in range(lacks + 1)]
        fits = max((more for more, each_s in enumerate(takes_s) if each_s <= left_s), default=0)
        gets = fits if fits == lacks or has >= MIN_PROCESSES else 0
        left_s -= takes_s[gets]
        if lacks:
            found.append(Repeats(pair, has, lacks, gets, takes_s[-1], takes_s[gets]))
    return found


def _fastest_pairs(cells: Iterable[Cell], ran: Processes) -> list[tuple[Cell, Cell]]:
    """Return of each kind of work the two strategies whose first process was fastest, each by its best cell.

    Of one strategy alone its two fastest cells. Strategies that split the sequence come before `local`, which
    is the base.
    """
    kinds: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        if cell.cell_id in ran and ran[cell.cell_id][0].tokens_per_s is not None:
            kind = cell.identity_without(NOT_COMPARED, None), cell.sequences_per_step
            kinds.setdefault(kind, []).append(cell)

    def order(cell: Cell) -> tuple[bool, float]:
        return STRATEGIES[cell.strategy].shares_sequences, ran[cell.cell_id][0].tokens_per_s or 0.0

    pairs = []
    for alike in kinds.values():
        ordered = sorted(alike, key=order, reverse=True)
        best = {cell.strategy: cell for cell in reversed(ordered)}
        first, *others = sorted(best.values(), key=order, reverse=True)
        second = next(iter(others), None) or next((cell for cell in ordered if cell is not first), None)
        if second is not None:
            pairs.append((first, second))
    return pairs


def _seconds(sides: Sequence[Sequence[Process]], until: int) -> float:
    """Return the seconds that both sides take until each has this many processes."""
    return sum(max(0, until - len(side)) * fmean(each.wall_s for each in side) for side in sides)


def _enough(sides: Sequence[Sequence[Process]]) -> int:
    """Return how many processes of each tell the two apart, as far as the first MIN_PROCESSES know."""
    if min(map(len, sides)) < MIN_PROCESSES:
        return MIN_PROCESSES
    speeds = [[p.tokens_per_s for p in side[:MIN_PROCESSES] if p.tokens_per_s is not None] for side in sides]
    if min(map(len, speeds)) < 2:  # noqa: PLR2004  a spread takes two
        return MIN_PROCESSES
    return enough_processes(pooled_spread(speeds))


def chosen_line(chosen: Repeats) -> str:
    """Return the line that announces further processes before they run."""
    one, other = map(CellLabels(chosen.cells).of, chosen.cells)
    return (
        f"measure.repeats={AUTO}: {chosen.gets} more processes of {one} and of {other}, interleaved, about"
        f" {duration_label(chosen.gets_s)}"
    )


def planned_lines(found: Sequence[Repeats], first_s: float, budget_s: float) -> list[str]:
    """Return what repeats will decide after `first_s` seconds of first processes, and what decides the rest.

    Empty where there is nothing to compare.
    """
    lines = [
        f"{length_label(each.seq_len)} will be decided: {each.gets} more processes of the two fastest"
        f" {_what(each)}, interleaved, about {duration_label(each.gets_s)} (measure.repeats={AUTO})"
        for each in found
        if each.gets
    ]
    left = sorted({each.seq_len for each in found if not each.gets})
    if left:
        lacks_s = sum(each.lacks_s for each in found)
        enough_s = ROUNDED_S * math.ceil((first_s + SPARE * lacks_s) / ROUNDED_S)
        lines.append(
            f"{', '.join(map(length_label, left))} will stay undecided, with one process of each cell: more"
            f" would not fit measure.repeats_budget_s={budget_s:g}; measure.repeats_budget_s={enough_s}"
            f" decides every length, in about {duration_label(first_s + lacks_s)}"
        )
    return lines


def _what(repeats: Repeats) -> str:
    """Return what the two cells are, in words."""
    if len({cell.strategy for cell in repeats.cells}) == 1:
        return "cells"
    splits = all(STRATEGIES[cell.strategy].shares_sequences for cell in repeats.cells)
    return "strategies that split the sequence" if splits else "strategies"
