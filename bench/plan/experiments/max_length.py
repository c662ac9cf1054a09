"""Cells of experiment=max_length, which searches for the longest sequence that each strategy trains.

Each length that the search tries is a cell. The first length is the longest one that fits by the memory
formula (`cost/memory.py`). Each further length follows from the records of the lengths before it.

A length trains if its cell has the status `ok`: there was memory for the weights, the gradients and the
optimizer state, at least one training step ran to its end, and all checks of the results passed. A length is
too long only if its cell has the status `out_of_memory`. Any other status ends the search for that strategy
without an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, zip_longest

from bench.common.environment import Machine
from bench.common.labels import length_label, value_label
from bench.config import MAX_WHOLE, Cell, ConfigError
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
"""Memory limit of a CPU rank, in GiB, if the request sets none.

A search then ends near 10,000 tokens, and one step of that length takes seconds.
"""
FIRST_DISTANCE_DIVISOR = 32
"""Divisor of the first length that gives the distance to the second length to try.

The memory formula errs by about 3 % for tensors, so the answer is probably that close to the first length.
"""
DEFAULT_FIRST_LENGTH = 8192
"""First length, in tokens, if the memory of a cell cannot be estimated."""
TRAINS_BY_STATUS: Mapping[str, bool] = {Status.OK: True, Status.OUT_OF_MEMORY: False}
"""Whether a length trains, by the status of its cell; other statuses give no answer."""
CellChooser = Callable[[Sequence[Record]], list[Cell]]
"""Function that receives all records so far and returns all cells so far.

These are the cells with a record, and for each strategy the next cell to run unless its search has ended.
"""


@dataclass(frozen=True, slots=True)
class Search:
    """Search for the longest sequence that one strategy trains, over multiples of `length_step` tokens."""

    request: Raw
    """Request for the strategy, whose `seq_len` is replaced by each tried length."""
    machine: Machine
    length_step: int
    """Tokens between neighbouring lengths; at least `layout_multiple`."""
    layout_multiple: int
    """Tokens of which a length has to be a multiple, by the layout; lengths are rounded down to one."""
    first_steps: int
    """First length to try, in length steps."""
    minimum_steps: int
    """Shortest length to try, in length steps."""
    _cells: dict[int, Cell] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Cache of `cell`, by length in length steps."""

    def cell(self, length_steps: int) -> Cell:
        """Return the cell whose length is this number of length steps, rounded down for the layout."""
        if length_steps not in self._cells:
            length = length_steps * self.length_step // self.layout_multiple * self.layout_multiple
            self._cells[length_steps] = resolve({**self.request, "seq_len": length}, self.machine)
        return self._cells[length_steps]

    def cells_until_next(self, statuses: Mapping[str, str]) -> Iterator[Cell]:
        """Yield the cells tried so far in order, and then the next cell unless the search has ended.

        Args:
            statuses: Status of each cell that has a record, by cell id.
        """

        def trains(length_steps: int) -> bool | None:
            """Return None without a record of this length, and for a status that gives no answer."""
            return TRAINS_BY_STATUS.get(statuses.get(self.cell(length_steps).cell_id, ""))

        maximum = MAX_WHOLE // self.length_step
        return map(self.cell, numbers_to_try(self.first_steps, self.minimum_steps, maximum, trains))


def make_cell_chooser(requests: Sequence[Raw], machine: Machine) -> CellChooser:
    """Return the `CellChooser` of these requests; it interleaves the cells of the strategies."""
    all_searches = searches(requests, machine)

    def choose_cells(records: Sequence[Record]) -> list[Cell]:
        statuses = {record.cell_id: record.status for record in records}
        rounds = zip_longest(*(search.cells_until_next(statuses) for search in all_searches))
        return [cell for cell in chain.from_iterable(rounds) if cell is not None]

    return choose_cells


def opening_text(requests: Sequence[Raw], machine: Machine) -> str:
    """Return the line that states the length step and the first lengths of the search.

    A second line states CPU_LIMIT_GIB if a request leaves the memory of CPU ranks unlimited.
    """
    first_cells = make_cell_chooser(requests, machine)([])
    first_lengths = ", ".join(f"{cell.strategy} {length_label(cell.seq_len)}" for cell in first_cells)
    length_step = values.tokens("length_step", requests[0]["length_step"])
    line = (
        f"experiment=max_length: searches for the longest sequence that trains, in steps of"
        f" length_step={length_label(length_step)}, by bisection between lengths that train and lengths that"
        f" run out of memory; first lengths: {first_lengths}"
    )
    if not any(_has_unlimited_cpu_ranks(request, machine) for request in requests):
        return line
    return (
        f"{line}\ncluster.memory_limit_gib={CPU_LIMIT_GIB}: the experiment sets this limit, because CPU ranks"
        " share the memory of the host; a larger limit allows longer sequences, which take longer"
    )


def searches(requests: Sequence[Raw], machine: Machine) -> list[Search]:
    """Return one search for each combination of strategy and other settings, without duplicates.

    Raises ConfigError for a bad value, for several lengths and for repeats.
    """
    lengths = {request["seq_len"] for request in requests}
    if len(lengths) > 1:
        raise ConfigError(
            f"seq_len={','.join(map(str, lengths))}: experiment=max_length searches for the length and takes"
            " one value, the first length; write one value, or leave it out"
        )
    by_cell_id = dict[str, Search]()
    for request in requests:
        if (repeats := request["measure"]["repeats"]) != 1:
            raise ConfigError(
                f"measure.repeats={value_label(repeats)}: experiment=max_length runs each length once; leave"
                " it out"
            )
        limit = {"memory_limit_gib": CPU_LIMIT_GIB} if _has_unlimited_cpu_ranks(request, machine) else {}
        limited = {**request, "cluster": {**request["cluster"], **limit}}
        for with_strategy in _requests_by_strategy(limited, machine):
            cell = resolve({**with_strategy, "seq_len": _shortest_length(request)}, machine)
            by_cell_id.setdefault(cell.cell_id, _search_for(with_strategy, cell, machine))
    return [*by_cell_id.values()]


def _requests_by_strategy(request: Raw, machine: Machine) -> list[Raw]:
    """Return the request if it names a strategy, and otherwise a request for each default strategy.

    Strategies that share sequences are left out if no ranks share one, as in a sweep without an experiment.
    """
    if "strategy" in request:
        return [request]
    options = (read_option("strategy", name) for name in default_strategies())
    # `without_sequence_sharing` resolves the requests, and an open length cannot be resolved.
    short = [{**request, "strategy": option, "seq_len": _shortest_length(request)} for option in options]
    kept, _ = without_sequence_sharing(short, machine)
    return [{**short_request, "seq_len": request["seq_len"]} for short_request in kept]


def _shortest_length(request: Raw) -> int:
    """Return the shortest length that leaves a token to train on after the prompt."""
    return _prompt_tokens(request) + 1


def _prompt_tokens(request: Raw) -> int:
    return values.whole_number("data.prompt_tokens", request["data"]["prompt_tokens"], least=0)


def _has_unlimited_cpu_ranks(request: Raw, machine: Machine) -> bool:
    placement = place(request["cluster"], target_machine(request, machine))
    return placement.device == "cpu" and request["cluster"]["memory_limit_gib"] is None


def _search_for(request: Raw, cell: Cell, machine: Machine) -> Search:
    """Return the search of a request; `cell` is its cell at any length."""
    multiple = _layout_multiple(cell)
    length_step = max(values.tokens("length_step", request["length_step"]), multiple)
    # The shortest length exceeds the prompt even if it is rounded down.
    minimum = (_prompt_tokens(request) + multiple) // length_step + 1
    if request["seq_len"] is None:
        first = _estimated_steps(cell, length_step, machine)
    else:
        first = round(values.tokens("seq_len", request["seq_len"]) / length_step)
    return Search(request, machine, length_step, multiple, max(first, minimum), minimum)


def _layout_multiple(cell: Cell) -> int:
    """Return the number of tokens of which the cell's length has to be a multiple, by its layout.

    It is 1 for a padded cell, and for a cell whose degrees of parallelism are illegal at any length.
    """
    with STRATEGIES.name_plugin_in_errors(cell.strategy):
        facts = STRATEGIES[cell.strategy]
        return 1 if cell.padding or facts.degree_refusals(cell) else facts.length_multiple(cell)


def _estimated_steps(cell: Cell, length_step: int, machine: Machine) -> int:
    """Return the longest length that fits by the memory formula, in length steps.

    It is DEFAULT_FIRST_LENGTH if the cell is illegal, or if its needed or its usable memory is unknown.
    """
    default, usable = max(1, DEFAULT_FIRST_LENGTH // length_step), usable_bytes(cell, machine)
    is_refused = refusal(replace(cell, seq_len=length_step, padding=0)) is not None
    if usable is None or is_refused or memory_need(cell) is None:
        return default

    def fits(length_steps: int) -> bool:
        need = memory_need(replace(cell, seq_len=length_steps * length_step, padding=0))
        return need is not None and need.total_bytes <= usable

    return max(filter(fits, numbers_to_try(default, 1, MAX_WHOLE // length_step, fits)), default=1)


def numbers_to_try(
    first: int, minimum: int, maximum: int, passes: Callable[[int], bool | None]
) -> Iterator[int]:
    """Yield the numbers to try, in order, to find the largest number from `minimum` to `maximum` that passes.

    The numbers go up from `first` while they pass, or down while they fail, with a distance that doubles.
    Once a number has passed and another has failed, the numbers bisect the interval between them. All numbers
    above a failing number are assumed to fail. `passes` returns None for a number that was not tried yet or
    that gave no answer; such a number is the last one.
    """
    number, low, high, distance = min(max(first, minimum), maximum), minimum - 1, maximum + 1, 0
    while high - low > 1:
        yield number
        answer = passes(number)
        if answer is None:
            return
        low, high = (number, high) if answer else (low, number)
        distance = 2 * distance or max(1, first // FIRST_DISTANCE_DIVISOR)
        if high > maximum:
            number = min(low + distance, maximum)
        elif low < minimum:
            number = max(high - distance, minimum)
        else:
            number = (low + high) // 2
