"""How often cells run: in turns, and where it is left open as often as a budget of time allows."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench.cell.trajectory import REFERENCE_STRATEGY
from bench.config import AUTO, RunConfig
from bench.labels import duration_label, length_label
from bench.statistics import MIN_PROCESSES

Turn = tuple[RunConfig, int]
"""A cell and its repeat, from 0."""


@dataclass(frozen=True, slots=True)
class Choice:
    """At which lengths cells run in MIN_PROCESSES processes, and at which in one."""

    often: frozenset[int]
    once: frozenset[int]
    """Lengths with something to compare for which the budget has no room."""
    more_s: float
    """What the further processes will take."""


def in_turns(cells: Sequence[RunConfig], repeats: Iterable[int]) -> list[Turn]:
    """Each of these repeats of every cell before any cell's next: a sweep broken off has as many of all.

    The first go from short to long, at each length what others are held against before them. The cells of
    later ones are shuffled by the seed: heat, and whatever else changes slowly, favours no cell.
    """
    seed = min((cell.seed for cell in cells), default=0)
    first = sorted(cells, key=lambda cell: (cell.seq_len, cell.strategy != REFERENCE_STRATEGY))
    return [
        (cell, repeat)
        for repeat in repeats
        for cell in (_shuffled(cells, f"{seed} {repeat}") if repeat else first)
    ]


def least_repeats(cell: RunConfig) -> int:
    """How often a cell runs whatever it takes."""
    return 1 if cell.measure.repeats == AUTO else cell.measure.repeats


def open_cells(cells: Iterable[RunConfig]) -> list[RunConfig]:
    """Those of which `measure.repeats` is left open."""
    return [cell for cell in cells if cell.measure.repeats == AUTO]


def choose(
    cells: Sequence[RunConfig], took_s: Mapping[str, float], ok: Collection[str], budget_s: float
) -> Choice:
    """Which lengths are worth more processes, by what one of each cell took; the soonest done come first.

    `took_s` is seconds by cell, `ok` holds the cells that worked. All cells of a length run equally often, so
    that they stay comparable; those of a length with fewer than two that worked have nothing to be compared
    with, so they are in neither set.
    """
    by_length: dict[int, list[float]] = {}
    for cell in cells:
        if cell.cell_id in ok:
            by_length.setdefault(cell.seq_len, []).append((MIN_PROCESSES - 1) * took_s[cell.cell_id])
    compared = {seq_len: sum(each) for seq_len, each in by_length.items() if len(each) > 1}
    left_s, often, more_s = budget_s - sum(took_s.values()), set[int](), 0.0
    for seq_len, cost_s in sorted(compared.items(), key=lambda pair: pair[1]):
        if more_s + cost_s > left_s:
            break
        often.add(seq_len)
        more_s += cost_s
    return Choice(frozenset(often), frozenset(compared) - often, more_s)


def planned_line(cells: Sequence[RunConfig]) -> str | None:
    """What will be decided once each of these cells has run; None where there will be nothing to compare."""
    lengths = [cell.seq_len for cell in cells]
    if len(lengths) == len(set(lengths)):
        return None
    return (
        f"measure.repeats={AUTO}: one process of each cell, then {MIN_PROCESSES - 1} more at lengths where"
        f" the sweep still fits {_budget(cells)}"
    )


def chosen_line(choice: Choice, cells: Sequence[RunConfig]) -> str | None:
    """Where it is six processes and where one; None where there is nothing to compare."""
    parts = []
    if choice.often:
        more = f"{MIN_PROCESSES - 1} more, about {duration_label(choice.more_s)}"
        parts.append(f"{MIN_PROCESSES} processes of each cell at {_lengths(choice.often)} ({more})")
    if choice.once:
        parts.append(f"one at {_lengths(choice.once)}: {MIN_PROCESSES} would not fit {_budget(cells)}")
    return f"measure.repeats={AUTO}: {'; '.join(parts)}" if parts else None


def _shuffled(cells: Sequence[RunConfig], seed: str) -> list[RunConfig]:
    return random.Random(seed).sample(cells, len(cells))


def _budget(cells: Sequence[RunConfig]) -> str:
    return f"measure.repeats_budget_s={cells[0].measure.repeats_budget_s:g}"


def _lengths(lengths: Collection[int]) -> str:
    return ", ".join(map(length_label, sorted(lengths)))
