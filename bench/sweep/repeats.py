"""How often cells run: in turns, and where it is left open as often as a budget of time allows."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from bench.cell.trajectory import REFERENCE_STRATEGY
from bench.config import AUTO, RunConfig
from bench.labels import duration_label, length_label
from bench.record import Status
from bench.statistics import (
    MAX_PROCESSES,
    MIN_PROCESSES,
    TOLD_RATIO,
    enough_processes,
    pooled_spread,
    slowest_median,
)

Turn = tuple[RunConfig, int]
"""A cell and its repeat, from 0."""


Processes = Sequence[Mapping[str, Any]]
"""The records of one cell's processes that worked, so far."""


@dataclass(frozen=True, slots=True)
class More:
    """How many processes the cells of one length have, get and would have to get."""

    has: int
    gets: int
    lacks: int
    took_s: float
    """One process of each of its cells."""


Choice = Mapping[int, More]
"""By length."""


def in_turns(cells: Sequence[RunConfig], repeats: Iterable[int]) -> list[Turn]:
    """Each of these repeats of every cell before any cell's next: a sweep broken off has as many of all.

    The first go from short to long, at each length what others are compared with before them. The cells of
    later ones are shuffled by the seed: heat, and whatever else changes slowly, favours no cell.
    """
    seed = min((cell.seed for cell in cells), default=0)
    first = sorted(cells, key=lambda cell: (cell.seq_len, cell.strategy != REFERENCE_STRATEGY))
    return [
        (cell, repeat)
        for repeat in repeats
        for cell in (random.Random(f"{seed} {repeat}").sample(cells, len(cells)) if repeat else first)
    ]


def least_repeats(cell: RunConfig) -> int:
    """How often a cell runs whatever it takes."""
    return 1 if cell.measure.repeats == AUTO else cell.measure.repeats


def ran_so_far(records: Iterable[Mapping[str, Any]]) -> dict[str, Processes]:
    """By cell, its processes that worked."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        if record["status"] == Status.OK:
            found.setdefault(record["cell_id"], []).append(record)
    return {**found}


def choose(cells: Iterable[RunConfig], ran: Mapping[str, Processes], left_s: float) -> Choice:
    """Which lengths get more processes, by what those that ran took and spread by; the soonest done first.

    All cells of a length run equally often, so that they stay comparable. MIN_PROCESSES come at once or not
    at all; once there, further ones come as far as there is room. A length with fewer than two cells that
    worked has nothing to compare: it is left out, and so is one that lacks nothing.
    """
    by_length: dict[int, list[Processes]] = {}
    for cell in cells:
        if cell.cell_id in ran:
            by_length.setdefault(cell.seq_len, []).append(ran[cell.cell_id])
    lacking = {
        seq_len: (_lacks(its), sum(fmean(float(each["wall_s"]) for each in cell) for cell in its))
        for seq_len, its in by_length.items()
        if len(its) > 1 and _lacks(its)
    }
    choice = dict[int, More]()
    for seq_len, (lacks, took_s) in sorted(lacking.items(), key=lambda pair: math.prod(pair[1])):
        has = min(map(len, by_length[seq_len]))
        fits = min(lacks, math.floor(left_s / took_s))
        gets = fits if fits == lacks or has >= MIN_PROCESSES else 0
        choice[seq_len] = More(has, gets, lacks, took_s)
        left_s -= gets * took_s
    return choice


def _lacks(cells: Sequence[Processes]) -> int:
    """How many more processes of each tell them apart, as far as those that ran know."""
    has = min(map(len, cells))
    if has < MIN_PROCESSES:
        return MIN_PROCESSES - has
    steps_ms = ([slowest_median(each["timing"]["step_times_ms"]) for each in cell] for cell in cells)
    return max(0, enough_processes(pooled_spread(steps_ms)) - has)


def planned_line(cells: Sequence[RunConfig]) -> str | None:
    """What will be decided once each of these cells has run; None where there will be nothing to compare."""
    lengths = [cell.seq_len for cell in cells]
    if len(lengths) == len(set(lengths)):
        return None
    return (
        f"measure.repeats={AUTO}: one process of each cell, then {MIN_PROCESSES - 1} more at lengths where"
        f" the sweep still fits {_budget(cells)}, and up to {MAX_PROCESSES} in all where {MIN_PROCESSES}"
        f" differ too much to tell {TOLD_RATIO - 1:.0%} apart"
    )


def chosen_line(choice: Choice, cells: Sequence[RunConfig]) -> str | None:
    """How many processes there will be at which lengths, and why no more; None where none are lacking."""
    lines, budget = [], _budget(cells)
    for seq_len, more in sorted(choice.items()):
        will_have, processes = more.has + more.gets, more.has + more.lacks
        line = f"{'one process' if will_have == 1 else f'{will_have} processes'} of each cell at "
        line += length_label(seq_len)
        if more.gets:
            line += f" ({more.gets} more, about {duration_label(more.gets * more.took_s)})"
        if will_have < processes:
            line += f": {processes} would not fit {budget}"
        lines.append(line)
    return f"measure.repeats={AUTO}: {'; '.join(lines)}" if lines else None


def _budget(cells: Sequence[RunConfig]) -> str:
    return f"measure.repeats_budget_s={cells[0].measure.repeats_budget_s:g}"
