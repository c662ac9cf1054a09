"""The longest sequence that each strategy trains: lengths tried one after another, each a cell.

The first is the longest that the memory formula has room for (`cost/memory.py`); where it leads from there
only the records say. A length trains if its cell's status is `ok`: the optimizer's state was there, at least
one whole step ran at that length, and every gate of a cell passed. Only `out_of_memory` says that it is too
long; any other end is no answer, and the search of that strategy ends with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, zip_longest
from typing import Any

from bench.config import ConfigError, RunConfig
from bench.cost.memory import memory_need
from bench.environment import Machine
from bench.experiments.bisection import fewest_and_most, tried
from bench.labels import length_label, shown
from bench.record import Status
from bench.request import values
from bench.request.choices import Raw, default_strategies, read_option
from bench.request.hardware import usable_bytes
from bench.request.legality import refusal
from bench.request.lone_rank import for_lone_ranks
from bench.request.placement import place
from bench.request.resolve import resolve
from bench.request.target import target_machine
from bench.strategies import STRATEGIES

CPU_LIMIT_GIB = 0.05
"""Of a CPU rank where the request names no limit: lengths of some 10k, which take seconds a step."""
UNGUESSED = 8192
"""Where a search begins of which no estimate says anything."""
OFF_BY = 2
"""The number of cells is stated for estimates that are wrong by at most this factor."""
ANSWERS: Mapping[str, bool] = {Status.OK: True, Status.OUT_OF_MEMORY: False}
"""Whether a length trains; any other status does not say."""
Grow = Callable[[Sequence[Mapping[str, Any]]], list[RunConfig]]


@dataclass(frozen=True, slots=True)
class Search:
    """What one strategy is asked: numbers of steps of its length, and the cell of each."""

    raw: Raw
    machine: Machine
    step: int
    """Tokens; at least what the layout divides a sequence by."""
    multiple: int
    """Lengths are rounded down to one of these."""
    first: int
    """Steps of the first length."""
    least: int
    """Steps of the shortest length."""

    def cell(self, steps: int) -> RunConfig:
        """The cell of a length."""
        return resolve({**self.raw, "seq_len": self._length(steps)}, self.machine)

    def _length(self, steps: int) -> int:
        return steps * self.step // self.multiple * self.multiple


def first_cells(raws: Sequence[Raw], machine: Machine) -> list[RunConfig]:
    """The first length of each strategy; equal searches are one. Raises ConfigError for an invalid value."""
    return [search.cell(search.first) for search in searches(raws, machine)]


def growing(raws: Sequence[Raw], machine: Machine) -> Grow:
    """What gives, of the records so far, every cell up to the next of each strategy, in turns."""
    found = [(search, cache(search.cell)) for search in searches(raws, machine)]

    def grow(records: Sequence[Mapping[str, Any]]) -> list[RunConfig]:
        statuses = {str(record["cell_id"]): str(record["status"]) for record in records}
        rounds = zip_longest(*(_led_to(search, cell_of, statuses) for search, cell_of in found))
        return [cell for cell in chain.from_iterable(rounds) if cell is not None]

    return grow


def _led_to(
    search: Search, cell_of: Callable[[int], RunConfig], statuses: Mapping[str, str]
) -> Iterator[RunConfig]:
    """The cells that the statuses so far, by cell, lead to: the last is the next to run, or the end."""

    def trains(steps: int) -> bool | None:
        return ANSWERS.get(statuses.get(cell_of(steps).cell_id, ""))

    yield from map(cell_of, tried(search.first, search.least, values.MAX_WHOLE // search.step, trains))


def told(raws: Sequence[Raw], machine: Machine) -> str:
    """What is about to be asked, of what memory, and how many cells it may take."""
    found = searches(raws, machine)
    step = values.tokens("length_step", raws[0]["length_step"])
    asked = (
        f"experiment=max_length: the longest sequence that trains, to length_step={length_label(step)}, by"
        " bisection over cells that train and cells that run out of memory"
    )
    lines = [asked]
    if any(_is_unlimited(raw, machine) for raw in raws):
        lines.append(
            f"cluster.memory_limit_gib={CPU_LIMIT_GIB}, the experiment's choice: CPU ranks have no memory of"
            " their own; name a larger limit for longer sequences, which take longer"
        )
    return "\n".join([*lines, *map(_told, found)])


def searches(raws: Sequence[Raw], machine: Machine) -> list[Search]:
    """One for every cell that the requests make but for its length; raises ConfigError for a bad value."""
    begun = {raw["seq_len"] for raw in raws}
    if len(begun) > 1:
        raise ConfigError(
            f"seq_len={','.join(map(str, begun))}: experiment=max_length looks for the length, and begins at"
            " one; name one, or none"
        )
    found = dict[str, Search]()
    for raw in raws:
        _refuse_repeats(raw)
        for full in _of_strategies(_limited(raw, machine), machine):
            cell = resolve({**full, "seq_len": _shortest(full)}, machine)
            found.setdefault(cell.cell_id, _search(full, cell, machine))
    return [*found.values()]


def _refuse_repeats(raw: Raw) -> None:
    repeats = raw["measure"]["repeats"]
    if repeats != 1:
        raise ConfigError(
            f"measure.repeats={shown(repeats)}: experiment=max_length runs each length once; leave it out"
        )


def _of_strategies(raw: Raw, machine: Machine) -> list[Raw]:
    """The request with its strategy; where it names none, with each that compares something here."""
    if "strategy" in raw:
        return [raw]
    options = (read_option("strategy", name) for name in default_strategies())
    full = [{**raw, "strategy": option, "seq_len": _shortest(raw)} for option in options]
    return [{**kept, "seq_len": raw["seq_len"]} for kept in for_lone_ranks(full, machine)[0]]


def _shortest(raw: Raw) -> int:
    """A length that leaves something to train on, for what does not depend on the length."""
    return _prompt(raw) + 1


def _prompt(raw: Raw) -> int:
    return values.whole("data.prompt_tokens", raw["data"]["prompt_tokens"], least=0)


def _is_unlimited(raw: Raw, machine: Machine) -> bool:
    """Whether nothing says what a rank may take: a CPU's ranks, without a limit."""
    where = place(raw["cluster"], target_machine(raw, machine))
    return where.device == "cpu" and raw["cluster"]["memory_limit_gib"] is None


def _limited(raw: Raw, machine: Machine) -> Raw:
    if not _is_unlimited(raw, machine):
        return raw
    return {**raw, "cluster": {**raw["cluster"], "memory_limit_gib": CPU_LIMIT_GIB}}


def _search(raw: Raw, cell: RunConfig, machine: Machine) -> Search:
    """The search of a cell that has any length."""
    multiple = _multiple(cell)
    step = max(values.tokens("length_step", raw["length_step"]), multiple)
    least = (_prompt(raw) + multiple) // step + 1
    if raw["seq_len"] is None:
        first = _estimated(cell, step, machine)
    else:
        first = round(values.tokens("seq_len", raw["seq_len"]) / step)
    return Search(raw, machine, step, multiple, max(first, least), least)


def _multiple(cell: RunConfig) -> int:
    """What the layout divides a length by; 1 where the cell is refused whatever its length, or is padded."""
    with STRATEGIES.plugin_errors_named(cell.strategy):
        facts = STRATEGIES[cell.strategy]
        return 1 if cell.padding or facts.degree_refusals(cell) else facts.length_multiple(cell)


def _estimated(cell: RunConfig, step: int, machine: Machine) -> int:
    """Steps of the longest length that the memory formula has room for, found as the search itself goes."""
    first, usable = max(1, UNGUESSED // step), usable_bytes(cell, machine)
    if usable is None or refusal(replace(cell, seq_len=step, padding=0)) is not None:
        return first

    def fits(steps: int) -> bool:
        need = memory_need(replace(cell, seq_len=steps * step, padding=0))
        return need is None or need.total <= usable

    if memory_need(cell) is None:
        return first
    return max(filter(fits, tried(first, 1, values.MAX_WHOLE // step, fits)), default=1)


def _told(search: Search) -> str:
    cell = search.cell(search.first)
    fewest, most = fewest_and_most(search.first, search.least, max(search.least, OFF_BY * search.first))
    begins = f"  {cell.strategy} begins at {length_label(cell.seq_len)}"
    return f"{begins} and takes {fewest} to {most} cells up to {length_label(OFF_BY * cell.seq_len)}"
