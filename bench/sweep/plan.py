"""A sweep as a list of cells, checked as a whole before the first one starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.cell.planned import PlannedCell
from bench.config import AUTO, LEASES, ConfigError, Resume, RunConfig, WhenTaken
from bench.environment import Machine
from bench.experiments import experiment_of
from bench.experiments.max_length import Grow
from bench.record import Role
from bench.request import values
from bench.request.choices import Raw
from bench.request.legality import refusal
from bench.request.lone_rank import for_lone_ranks
from bench.request.values import refuse_too_many
from bench.strategies import STRATEGIES
from bench.sweep.auto_choices import choice_lines
from bench.sweep.repeats import Turn, choose, chosen_line, in_turns, least_repeats, planned_line, ran_so_far


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep will run."""

    cells: tuple[PlannedCell, ...]
    """In the order in which they run."""
    folder: Path
    """Where records and report go."""
    resume: Resume
    """Which of the records that the folder has already are kept."""
    lease: WhenTaken = WhenTaken.WAIT
    """What to do while another sweep runs on the same devices."""
    open_cells: tuple[RunConfig, ...] = ()
    """Those that may be repeated, once each has run."""
    grow: Grow | None = None
    """What gives of the records so far all cells up to the next ones, where those depend on them."""
    note: str | None = None
    """What a person should know of the repeats."""
    notes: tuple[str, ...] = ()
    """What was chosen and left out."""

    @property
    def roles(self) -> dict[str, Role]:
        """Each cell's role by its id."""
        return {planned.cell.cell_id: planned.role for planned in self.cells}

    @property
    def is_open(self) -> bool:
        """Whether records may add to it."""
        return self.grow is not None or bool(self.open_cells)

    def grown(self, records: Sequence[Mapping[str, Any]]) -> Plan:
        """The plan with what the records so far add to it: cells that depend on them, or repeats."""
        if self.grow is None:
            return self.repeated(records)
        planned = {each.cell.cell_id for each in self.cells}
        more = [(cell, 0) for cell in self.grow(records) if cell.cell_id not in planned]
        return replace(self, cells=(*self.cells, *_in_order(more, len(self.cells), {})), note=None)

    def repeated(self, records: Sequence[Mapping[str, Any]]) -> Plan:
        """The plan with more of the repeats that were left open, chosen by what ran so far.

        Twice in a sweep: once each cell has run, and once they have run MIN_PROCESSES times. Each time the
        records of the repeats up to then decide, so a sweep that is resumed chooses as it did before.
        """
        if not self.open_cells:
            return self
        left_open = {cell.cell_id for cell in self.open_cells}
        repeats = 1 + max(each.repeat for each in self.cells if each.cell.cell_id in left_open)
        before = [record for record in records if record["repeat"] < repeats]
        left_s = self.open_cells[0].measure.repeats_budget_s - sum(float(each["wall_s"]) for each in before)
        ran = ran_so_far(before)
        choice = choose(self.open_cells, ran, left_s)
        until = {seq_len: repeats + more.gets for seq_len, more in choice.items() if more.gets}
        chosen = [cell for cell in self.open_cells if cell.seq_len in until and cell.cell_id in ran]
        turns = in_turns(chosen, range(repeats, max(until.values(), default=repeats)))
        turns = [(cell, repeat) for cell, repeat in turns if repeat < until[cell.seq_len]]
        return replace(
            self,
            cells=(*self.cells, *_in_order(turns, len(self.cells), self.roles)),
            open_cells=tuple(chosen) if repeats == 1 else (),
            note=chosen_line(choice, self.open_cells),
        )


def plan(raws: Sequence[Raw], machine: Machine, *, single: bool, default_strategies: bool = False) -> Plan:
    """Validate every cell, drop duplicates, repeat in turns. Cells whose repeats are left open have one each.

    With `default_strategies` nobody named a strategy: those that cannot share a sequence here are left out.
    Raises ConfigError for the first bad value; in a single run also for an illegal combination, which a sweep
    records as `unsupported`.
    """
    refuse_too_many([len(raws)])
    experiment = experiment_of(raws)
    drops = default_strategies and not experiment.needs_sharing
    raws, left_out = for_lone_ranks(raws, machine) if drops else (raws, None)
    cells = {cell.cell_id: cell for cell in experiment.cells(raws, machine)}
    for cell in cells.values():
        _refuse_failing_facts(cell)
        if single and (reason := refusal(cell)) is not None:
            raise ConfigError(reason)
    most = max(map(least_repeats, cells.values()))
    refuse_too_many([len(cells), most])
    turns = [turn for turn in in_turns([*cells.values()], range(most)) if turn[1] < least_repeats(turn[0])]
    first = raws[0]
    resume = values.resume("resume", first["resume"])
    lease = WhenTaken(values.choice("lease", first["lease"], LEASES))
    left_open = tuple(cell for cell in cells.values() if cell.measure.repeats == AUTO)
    return Plan(
        cells=tuple(_in_order(turns, 0, experiment.roles([*cells.values()]))),
        folder=Path(values.text("sweep_dir", first["sweep_dir"])),
        resume=resume,
        lease=lease,
        open_cells=left_open,
        grow=None if experiment.growing is None else experiment.growing(raws, machine),
        note=planned_line(left_open),
        notes=(
            *([] if left_out is None else [left_out]),
            *choice_lines(raws, [*cells.values()], machine),
        ),
    )


def _in_order(turns: Iterable[Turn], first: int, roles: Mapping[str, Role]) -> list[PlannedCell]:
    return [
        PlannedCell(cell, repeat, order, roles.get(cell.cell_id, Role.CELL))
        for order, (cell, repeat) in enumerate(turns, first)
    ]


def _refuse_failing_facts(cell: RunConfig) -> None:
    """Raises ConfigError where a plugin's facts fail: later, while cells run, that would end the sweep."""
    with STRATEGIES.plugin_errors_named(cell.strategy):
        answers: Mapping[str, Any] = {
            "refusals": "; ".join(STRATEGIES[cell.strategy].refusals(cell)),
            "exchange_bytes": STRATEGIES[cell.strategy].exchange_bytes(cell),
            "schedule": STRATEGIES[cell.strategy].schedule(cell),
        }
        if not isinstance(answers["exchange_bytes"], int):
            raise TypeError(f"exchange_bytes must be a whole number, not {answers['exchange_bytes']!r}")
