"""Cells of experiment=max_length, which searches for the longest sequence that each strategy trains.

Each tried length is a cell. The first length is the longest that fits by the memory formula
(`cost/memory.py`); the records decide on the next lengths. A length trains if the status of its cell is `ok`:
the optimizer state existed, at least one whole step ran at this length, and every gate passed. Only
`out_of_memory` shows that a length is too long; any other status ends the search of its strategy without an
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, zip_longest

from bench.common.environment import Machine
from bench.common.labels import length_label, value_label
from bench.config import Cell, ConfigError
from bench.cost.memory import memory_need
from bench.record.record import Record, Status
from bench.request import values
from bench.request.choices import Raw, default_strategies, read_option
from bench.request.hardware import usable_bytes
from bench.request.legality import refusal
from bench.request.modes import target_machine
from bench.request.open_choices import without_sequence_sharing
from bench.request.placement import place
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES

CPU_LIMIT_GIB = 0.05
"""Memory limit of a CPU rank if the request sets none; it allows some 10k tokens, with seconds per step."""
FIRST_DISTANCE_DIVISOR = 32
"""Ratio of the first number to its distance from the second; for tensors the memory formula errs by 3 %."""
DEFAULT_FIRST_LENGTH = 8192
"""First length of a search without a memory estimate, in tokens."""
TRAINS: Mapping[str, bool] = {Status.OK: True, Status.OUT_OF_MEMORY: False}
"""Whether a length with this status trains; other statuses give no answer."""
Grow = Callable[[Sequence[Record]], list[Cell]]
"""Function that returns all cells up to the next ones from the records so far."""


@dataclass(frozen=True, slots=True)
class Search:
    """Search for the longest sequence of one strategy, over lengths that are multiples of a step."""

    raw: Raw
    machine: Machine
    step: int
    """Tokens of a step; at least `multiple`."""
    multiple: int
    """Number that the layout requires to divide a length, to a multiple of which lengths are rounded down."""
    first: int
    """Number of steps in the first length."""
    least: int
    """Number of steps in the shortest length."""

    def cell(self, steps: int) -> Cell:
        """Return the cell whose length is this number of steps."""
        length = steps * self.step // self.multiple * self.multiple
        return resolve({**self.raw, "seq_len": length}, self.machine)


def make_grow(raws: Sequence[Raw], machine: Machine) -> Grow:
    """Return the function that gives every cell up to the next one of each strategy, from the records so far.

    The cells of the strategies are interleaved.
    """
    cells_of = [(search, cache(search.cell)) for search in searches(raws, machine)]

    def grow(records: Sequence[Record]) -> list[Cell]:
        statuses = {record.cell_id: record.status for record in records}

        def cells_until_next(search: Search, cell_of: Callable[[int], Cell]) -> Iterator[Cell]:
            def trains(steps: int) -> bool | None:
                return TRAINS.get(statuses.get(cell_of(steps).cell_id, ""))

            largest = values.MAX_WHOLE // search.step
            return map(cell_of, numbers_to_try(search.first, search.least, largest, trains))

        rounds = zip_longest(*(cells_until_next(search, cell_of) for search, cell_of in cells_of))
        return [cell for cell in chain.from_iterable(rounds) if cell is not None]

    return grow


def search_line(raws: Sequence[Raw], machine: Machine) -> str:
    """Return the lines that state the search, its first lengths and the memory limit of CPU ranks."""
    cells = make_grow(raws, machine)([])
    first_lengths = ", ".join(f"{cell.strategy} {length_label(cell.seq_len)}" for cell in cells)
    step = values.tokens("length_step", raws[0]["length_step"])
    line = (
        f"experiment=max_length: searches for the longest sequence that trains, in steps of"
        f" length_step={length_label(step)}, by bisection between lengths that train and lengths that run out"
        f" of memory; first lengths: {first_lengths}"
    )
    if not any(_is_unlimited(raw, machine) for raw in raws):
        return line
    return (
        f"{line}\ncluster.memory_limit_gib={CPU_LIMIT_GIB}: the experiment sets this limit, because CPU ranks"
        " share the memory of the host; a larger limit allows longer sequences, which take longer"
    )


def searches(raws: Sequence[Raw], machine: Machine) -> list[Search]:
    """Return a search for each requested cell, whatever its length; raise ConfigError for a bad value."""
    lengths = {raw["seq_len"] for raw in raws}
    if len(lengths) > 1:
        raise ConfigError(
            f"seq_len={','.join(map(str, lengths))}: experiment=max_length searches for the length and takes"
            " one value, the first length; write one value, or leave it out"
        )
    by_cell_id = dict[str, Search]()
    for raw in raws:
        if (repeats := raw["measure"]["repeats"]) != 1:
            raise ConfigError(
                f"measure.repeats={value_label(repeats)}: experiment=max_length runs each length once; leave"
                " it out"
            )
        limit = {"memory_limit_gib": CPU_LIMIT_GIB} if _is_unlimited(raw, machine) else {}
        for full in _with_strategy({**raw, "cluster": {**raw["cluster"], **limit}}, machine):
            cell = resolve({**full, "seq_len": _shortest_length(full)}, machine)
            by_cell_id.setdefault(cell.cell_id, _search_of(full, cell, machine))
    return [*by_cell_id.values()]


def _with_strategy(raw: Raw, machine: Machine) -> list[Raw]:
    """Return the request if it names a strategy, or else a request for each default strategy."""
    if "strategy" in raw:
        return [raw]
    options = (read_option("strategy", name) for name in default_strategies())
    full = [{**raw, "strategy": option, "seq_len": _shortest_length(raw)} for option in options]
    return [{**request, "seq_len": raw["seq_len"]} for request in without_sequence_sharing(full, machine)[0]]


def _shortest_length(raw: Raw) -> int:
    """Return the shortest length with a token to train on, for all that does not depend on the length."""
    return _prompt_tokens(raw) + 1


def _prompt_tokens(raw: Raw) -> int:
    return values.whole_number("data.prompt_tokens", raw["data"]["prompt_tokens"], least=0)


def _is_unlimited(raw: Raw, machine: Machine) -> bool:
    """Return whether the memory of a rank is unlimited: that of CPU ranks without a limit."""
    placement = place(raw["cluster"], target_machine(raw, machine))
    return placement.device == "cpu" and raw["cluster"]["memory_limit_gib"] is None


def _search_of(raw: Raw, cell: Cell, machine: Machine) -> Search:
    """Return the search that starts from a cell, whose length does not matter."""
    multiple = _length_multiple(cell)
    step = max(values.tokens("length_step", raw["length_step"]), multiple)
    least = (_prompt_tokens(raw) + multiple) // step + 1
    if raw["seq_len"] is None:
        first = _estimated_steps(cell, step, machine)
    else:
        first = round(values.tokens("seq_len", raw["seq_len"]) / step)
    return Search(raw, machine, step, multiple, max(first, least), least)


def _length_multiple(cell: Cell) -> int:
    """Return the number that the layout requires to divide a length.

    It is 1 for a padded cell, and for a cell that is illegal at any length.
    """
    with STRATEGIES.name_plugin_in_errors(cell.strategy):
        facts = STRATEGIES[cell.strategy]
        return 1 if cell.padding or facts.degree_refusals(cell) else facts.length_multiple(cell)


def _estimated_steps(cell: Cell, step: int, machine: Machine) -> int:
    """Return the number of steps of the longest length that fits by the memory formula."""
    first, usable = max(1, DEFAULT_FIRST_LENGTH // step), usable_bytes(cell, machine)
    is_refused = refusal(replace(cell, seq_len=step, padding=0)) is not None
    if usable is None or is_refused or memory_need(cell) is None:
        return first

    def fits(steps: int) -> bool:
        need = memory_need(replace(cell, seq_len=steps * step, padding=0))
        return need is not None and need.total_bytes <= usable

    return max(filter(fits, numbers_to_try(first, 1, values.MAX_WHOLE // step, fits)), default=1)


def numbers_to_try(first: int, least: int, most: int, passes: Callable[[int], bool | None]) -> Iterator[int]:
    """Yield the numbers to try, in order, to find the largest number from `least` to `most` that passes.

    The numbers go up from `first` while they pass, or down while they fail, with a distance that doubles.
    Once a number has passed and another has failed, the numbers bisect the interval between them. All numbers
    above a failing number are assumed to fail. `passes` returns None for a number that was not tried yet or
    that gave no answer; no number follows it.
    """
    number, low, high, distance = min(max(first, least), most), least - 1, most + 1, 0
    while high - low > 1:
        yield number
        answer = passes(number)
        if answer is None:
            return
        low, high = (number, high) if answer else (low, number)
        distance = 2 * distance or max(1, first // FIRST_DISTANCE_DIVISOR)
        if high > most:
            number = min(low + distance, most)
        elif low < least:
            number = max(high - distance, least)
        else:
            number = (low + high) // 2
