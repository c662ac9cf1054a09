"""Repeats of cells: their order, and with `measure.repeats=auto` their number within a budget of time."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.common.labels import duration_label, length_label
from bench.common.statistics import (
    MIN_PROCESSES,
    TIME_MARGIN,
    enough_processes,
    pooled_spread,
    slowest_median,
)
from bench.config import AUTO, Cell
from bench.plan.cell_labels import CellLabels
from bench.plan.work import REFERENCE_STRATEGY
from bench.record.record import Record, Status
from bench.strategies import STRATEGIES

CellRepeat = tuple[Cell, int]
"""A cell and the number of its repeat, from 0."""
NOT_COMPARED = frozenset(
    {
        *("strategy", "options", "layout", "kernel", "sp_degree", "ulysses_degree", "dp_replicate"),
        *("dp_shard", "batch", "grad_accum", "cluster", "seed", "padding", "trainer", "loss"),
        *("measure", "env", "replay"),
    }
)
"""Fields in which two cells may differ whose speeds are compared, as in `analysis.cells.comparison`."""
ROUNDED_S = 100
"""Number of seconds to a multiple of which a suggested budget is rounded up."""


@dataclass(frozen=True, slots=True)
class CellProcess:
    """One run of a cell."""

    wall_s: float
    tokens_per_s: float | None
    """Speed of the run; None if it failed."""


Processes = Mapping[str, Sequence[CellProcess]]
"""Finished processes of each cell, by cell id, in the order of their repeats."""


@dataclass(frozen=True, slots=True)
class RepeatPlan:
    """Further processes of the two fastest cells of one kind of work, to decide which of them is faster.

    Cells are of one kind of work if they differ only in NOT_COMPARED and have equal sequences per step.
    """

    cells: tuple[Cell, Cell]
    done: int
    """Number of processes that each of the two cells has run already."""
    missing: int
    """Number of further processes of each cell that the comparison needs."""
    added: int
    """Number of further processes of each cell that are run, as the budget allows; at most `missing`."""
    missing_s: float
    """Estimated seconds of the missing processes of both cells."""
    added_s: float
    """Estimated seconds of the added processes of both cells."""

    @property
    def seq_len(self) -> int:
        return self.cells[0].seq_len

    @property
    def label(self) -> str:
        """Length and degrees, such as `64k sp 4`."""
        degrees = " and ".join(map(str, sorted({cell.sp_degree for cell in self.cells} - {1})))
        return f"{length_label(self.seq_len)} sp {degrees}" if degrees else length_label(self.seq_len)

    @property
    def cell_repeats(self) -> list[CellRepeat]:
        """Added processes in the order in which they run."""
        return interleave(self.cells, range(self.done, self.done + self.added))


def interleave(cells: Sequence[Cell], repeats: Iterable[int]) -> list[CellRepeat]:
    """Return every cell with the first of the repeat numbers, then every cell with the second, and so on.

    Every cell of an interrupted sweep thus has about the same number of repeats. With repeat 0 the cells
    are sorted by length, with `local` before the strategies that are compared with it. With each later repeat
    they are shuffled by the seed, so that heat and other slow changes favour no cell.
    """
    seed = min((cell.seed for cell in cells), default=0)
    first = sorted(cells, key=lambda cell: (cell.seq_len, cell.strategy != REFERENCE_STRATEGY))
    return [
        (cell, repeat)
        for repeat in repeats
        for cell in (random.Random(f"{seed} {repeat}").sample(cells, len(cells)) if repeat else first)
    ]


def least_repeats(cell: Cell) -> int:
    """Return the number of runs that a cell has whatever its records: 1 if `measure.repeats` is auto."""
    return 1 if cell.measure.repeats == AUTO else cell.measure.repeats


def processes_of(records: Iterable[Record]) -> Processes:
    """Return the finished processes of each cell that has a record."""
    processes: dict[str, list[CellProcess]] = {}
    for record in sorted(records, key=lambda record: record.repeat):
        speed, timing = None, record.timing
        if record.status is Status.OK and timing is not None:
            speed = 1e3 * timing.tokens_per_step / slowest_median(timing.step_times_ms)
        processes.setdefault(record.cell_id, []).append(CellProcess(record.wall_s, speed))
    return processes


def choose_repeats(cells: Iterable[Cell], ran: Processes, budget_s: float) -> list[RepeatPlan]:
    """Return a `RepeatPlan` for each kind of work that needs more processes, the longest sequences first.

    The budget is spent in this order. The processes up to MIN_PROCESSES are added all or not at all. The
    number of processes after them follows from the spread of the first processes and never from the
    difference between the two cells, because a test that stops once it likes the difference claims one too
    often.

    Args:
        cells: Cells with `measure.repeats=auto`.
        ran: Their finished processes.
        budget_s: Seconds that all added processes may take together.
    """
    pairs = sorted(_fastest_pairs(cells, ran), key=lambda pair: pair[0].seq_len, reverse=True)
    repeat_plans = []
    for pair in pairs:
        processes = [ran[cell.cell_id] for cell in pair]
        done = min(map(len, processes))
        missing = max(0, _needed_processes(processes) - done)
        costs_s = [_processes_s(processes, done + count) for count in range(missing + 1)]
        affordable = max((count for count, cost_s in enumerate(costs_s) if cost_s <= budget_s), default=0)
        added = affordable if affordable == missing or done >= MIN_PROCESSES else 0
        budget_s -= costs_s[added]
        if missing:
            repeat_plans.append(RepeatPlan(pair, done, missing, added, costs_s[-1], costs_s[added]))
    return repeat_plans


def _fastest_pairs(cells: Iterable[Cell], ran: Processes) -> list[tuple[Cell, Cell]]:
    """Return for each kind of work the fastest cells of its two fastest strategies, by their first process.

    If only one strategy ran, the pair is its two fastest cells; without two cells there is no pair.
    Strategies that split the sequence come before `local`, even if it is faster.
    """
    kinds: dict[tuple[str, int], list[Cell]] = {}
    for cell in cells:
        if cell.cell_id in ran and ran[cell.cell_id][0].tokens_per_s is not None:
            kind = cell.identity_without(NOT_COMPARED, None), cell.sequences_per_step
            kinds.setdefault(kind, []).append(cell)

    def order(cell: Cell) -> tuple[bool, float]:
        return STRATEGIES[cell.strategy].shares_sequences, ran[cell.cell_id][0].tokens_per_s or 0.0

    pairs = []
    for same_work in kinds.values():
        ordered = sorted(same_work, key=order, reverse=True)
        best = {cell.strategy: cell for cell in reversed(ordered)}
        first, *others = sorted(best.values(), key=order, reverse=True)
        second = next(iter(others), None) or next((cell for cell in ordered if cell is not first), None)
        if second is not None:
            pairs.append((first, second))
    return pairs


def _processes_s(pair: Sequence[Sequence[CellProcess]], count: int) -> float:
    """Return the seconds until both cells of a pair have `count` processes."""
    return sum(max(0, count - len(ran)) * fmean(process.wall_s for process in ran) for ran in pair)


def _needed_processes(pair: Sequence[Sequence[CellProcess]]) -> int:
    """Return the number of processes of each cell that a comparison needs.

    It follows from the spread of the speeds of the first MIN_PROCESSES processes. Until both cells have run
    them, or if fewer than two of a cell have a speed, it is MIN_PROCESSES.
    """
    if min(map(len, pair)) < MIN_PROCESSES:
        return MIN_PROCESSES
    speeds = [[p.tokens_per_s for p in ran[:MIN_PROCESSES] if p.tokens_per_s is not None] for ran in pair]
    if min(map(len, speeds)) < 2:  # noqa: PLR2004  a spread needs two speeds
        return MIN_PROCESSES
    return enough_processes(pooled_spread(speeds))


def chosen_line(chosen: RepeatPlan) -> str:
    """Return the line that announces further processes before they run."""
    one, other = map(CellLabels(chosen.cells).label, chosen.cells)
    return (
        f"measure.repeats={AUTO}: {chosen.added} more processes of {one} and of {other}, interleaved, about"
        f" {duration_label(chosen.added_s)}"
    )


def planned_lines(repeat_plans: Sequence[RepeatPlan], first_s: float, budget_s: float) -> list[str]:
    """Return the lines that name the lengths that repeats will decide, and a budget that decides the others.

    Args:
        repeat_plans: Repeats that follow from estimated times; without any, there are no lines.
        first_s: Estimated seconds of the first processes of all cells.
        budget_s: `measure.repeats_budget_s`.
    """
    decided: dict[tuple[str, str, int], float] = {}
    for plan in repeat_plans:
        if plan.added:
            subject = plan.label, _pair_label(plan), plan.added
            decided[subject] = decided.get(subject, 0.0) + plan.added_s
    lines = [
        f"{label} will be decided: {added} more processes of the two fastest {pair}, interleaved, about"
        f" {duration_label(added_s)} (measure.repeats={AUTO})"
        for (label, pair, added), added_s in decided.items()
    ]
    by_length = sorted(repeat_plans, key=lambda plan: (plan.seq_len, plan.label))
    in_part = {label for label, *_ in decided}
    undecided = dict.fromkeys(
        f"{plan.label} of other settings" if plan.label in in_part else plan.label
        for plan in by_length
        if not plan.added
    )
    if undecided:
        missing_s = sum(plan.missing_s for plan in repeat_plans)
        enough_s = ROUNDED_S * math.ceil((first_s + TIME_MARGIN * missing_s) / ROUNDED_S)
        lines.append(
            f"{', '.join(undecided)} will stay undecided, with one process of each cell,"
            f" because repeats do not fit in measure.repeats_budget_s={budget_s:g};"
            f" measure.repeats_budget_s={enough_s} decides every length, in about"
            f" {duration_label(first_s + missing_s)}"
        )
    return lines


def _pair_label(repeat_plan: RepeatPlan) -> str:
    """Return the plural noun that describes the two cells, such as `strategies that split the sequence`."""
    if len({cell.strategy for cell in repeat_plan.cells}) == 1:
        return "cells"
    splits = all(STRATEGIES[cell.strategy].shares_sequences for cell in repeat_plan.cells)
    return "strategies that split the sequence" if splits else "strategies"
