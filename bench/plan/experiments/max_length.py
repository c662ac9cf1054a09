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

from bench.common.environment import Machine
from bench.common.labels import length_label, shown
from bench.config import Cell, ConfigError
from bench.cost.memory import memory_need
from bench.record.record import Record, Status
from bench.request import values
from bench.request.choices import Raw, default_strategies, read_option
from bench.request.hardware import usable_bytes
from bench.request.legality import refusal
from bench.request.modes import target_machine
from bench.request.open_choices import for_lone_ranks
from bench.request.placement import place
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES

CPU_LIMIT_GIB = 0.05
"""Of a CPU rank where the request names no limit: lengths of some 10k, which take seconds a step."""
FIRST_SHARE = 32
"""The second number is a part of so many away from the first: of tensors the memory formula is within 3 %."""
UNGUESSED = 8192
"""Where a search begins of which no estimate says anything."""
ANSWERS: Mapping[str, bool] = {Status.OK: True, Status.OUT_OF_MEMORY: False}
"""Whether a length trains; any other status does not say."""
Grow = Callable[[Sequence[Record]], list[Cell]]


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

    def cell(self, steps: int) -> Cell:
        """The cell of a length."""
        length = steps * self.step // self.multiple * self.multiple
        return resolve({**self.raw, "seq_len": length}, self.machine)


def growing(raws: Sequence[Raw], machine: Machine) -> Grow:
    """What gives, of the records so far, every cell up to the next of each strategy, in turns."""
    found = [(search, cache(search.cell)) for search in searches(raws, machine)]

    def grow(records: Sequence[Record]) -> list[Cell]:
        statuses = {record.cell_id: record.status for record in records}

        def led_to(search: Search, cell_of: Callable[[int], Cell]) -> Iterator[Cell]:
            def trains(steps: int) -> bool | None:
                return ANSWERS.get(statuses.get(cell_of(steps).cell_id, ""))

            most = values.MAX_WHOLE // search.step
            return map(cell_of, tried(search.first, search.least, most, trains))

        rounds = zip_longest(*(led_to(*each) for each in found))
        return [cell for cell in chain.from_iterable(rounds) if cell is not None]

    return grow


def opening_line(raws: Sequence[Raw], machine: Machine) -> str:
    """What is about to be asked, of what memory, and where each search begins."""
    begun = ", ".join(f"{cell.strategy} {length_label(cell.seq_len)}" for cell in growing(raws, machine)([]))
    step = values.tokens("length_step", raws[0]["length_step"])
    asked = (
        f"experiment=max_length: the longest sequence that trains, to length_step={length_label(step)}, by"
        f" bisection over cells that train and cells that run out of memory; first lengths: {begun}"
    )
    if not any(_is_unlimited(raw, machine) for raw in raws):
        return asked
    return (
        f"{asked}\ncluster.memory_limit_gib={CPU_LIMIT_GIB}, the experiment's choice: CPU ranks have no"
        " memory of their own; name a larger limit for longer sequences, which take longer"
    )


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
        if (repeats := raw["measure"]["repeats"]) != 1:
            raise ConfigError(
                f"measure.repeats={shown(repeats)}: experiment=max_length runs each length once; leave it out"
            )
        limit = {"memory_limit_gib": CPU_LIMIT_GIB} if _is_unlimited(raw, machine) else {}
        for full in _of_strategies({**raw, "cluster": {**raw["cluster"], **limit}}, machine):
            cell = resolve({**full, "seq_len": _shortest(full)}, machine)
            found.setdefault(cell.cell_id, _search(full, cell, machine))
    return [*found.values()]


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


def _search(raw: Raw, cell: Cell, machine: Machine) -> Search:
    """The search of a cell that has any length."""
    multiple = _multiple(cell)
    step = max(values.tokens("length_step", raw["length_step"]), multiple)
    least = (_prompt(raw) + multiple) // step + 1
    if raw["seq_len"] is None:
        first = _estimated(cell, step, machine)
    else:
        first = round(values.tokens("seq_len", raw["seq_len"]) / step)
    return Search(raw, machine, step, multiple, max(first, least), least)


def _multiple(cell: Cell) -> int:
    """What the layout divides a length by; 1 where the cell is refused whatever its length, or is padded."""
    with STRATEGIES.plugin_errors_named(cell.strategy):
        facts = STRATEGIES[cell.strategy]
        return 1 if cell.padding or facts.degree_refusals(cell) else facts.length_multiple(cell)


def _estimated(cell: Cell, step: int, machine: Machine) -> int:
    """Steps of the longest length that the memory formula has room for, found as the search itself goes."""
    first, usable = max(1, UNGUESSED // step), usable_bytes(cell, machine)
    is_refused = refusal(replace(cell, seq_len=step, padding=0)) is not None
    if usable is None or is_refused or memory_need(cell) is None:
        return first

    def fits(steps: int) -> bool:
        need = memory_need(replace(cell, seq_len=steps * step, padding=0))
        return need is not None and need.total <= usable

    return max(filter(fits, tried(first, 1, values.MAX_WHOLE // step, fits)), default=1)


def tried(first: int, least: int, most: int, passes: Callable[[int], bool | None]) -> Iterator[int]:
    """The numbers from `least` to `most` that are tried, the last being one of which nothing is known.

    They lead to the largest that passes where all larger ones fail.

    From `first` up while they pass, or down while they fail, each time twice as far; once one of each is
    known, the middle between them, until no number is left there. `passes` is None for a number that was not
    tried yet and for one that gave no answer: nothing comes after it.
    """
    number, low, high, distance = min(max(first, least), most), least - 1, most + 1, 0
    while high - low > 1:
        yield number
        answer = passes(number)
        if answer is None:
            return
        low, high = (number, high) if answer else (low, number)
        distance = 2 * distance or max(1, first // FIRST_SHARE)
        if high > most:
            number = min(low + distance, most)
        elif low < least:
            number = max(high - distance, least)
        else:
            number = (low + high) // 2
