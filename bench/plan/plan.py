"""A sweep as a list of cells, checked as a whole before the first one starts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench.common.environment import Machine
from bench.config import AUTO, LEASES, Cell, ConfigError, Resume, WhenTaken
from bench.plan.auto_choices import choice_lines
from bench.plan.experiments import EXPERIMENTS, Experiment, experiment_of
from bench.plan.experiments.max_length import Grow
from bench.plan.local_cells import reference_cells, with_fitting_base
from bench.plan.planned import PlannedCell, planned_cell
from bench.plan.repeats import Turn, choose, chosen_line, in_turns, least_repeats, processes_of
from bench.plan.stored import StoredSweep, stored_sweep
from bench.record.record import Record, Role, Status
from bench.request import values
from bench.request.choices import Raw
from bench.request.modes import PREDICT
from bench.request.open_choices import for_lone_ranks, with_one_engine
from bench.request.values import refuse_too_many
from bench.strategies import STRATEGIES


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep will run."""

    cells: tuple[PlannedCell, ...]
    """In the order in which they run."""
    machine: Machine
    """The machine that its cells are planned for."""
    folder: Path
    """Where records and report go."""
    stored: StoredSweep
    """The sweep that the folder has already."""
    resume: Resume
    """Which of the records that the folder has already are kept."""
    experiment: Experiment = EXPERIMENTS["none"]
    """The question that its cells answer."""
    lease: WhenTaken = WhenTaken.WAIT
    """What to do while another sweep runs on the same devices."""
    open_cells: tuple[Cell, ...] = ()
    """Those that may be repeated, once each has run."""
    grow: Grow | None = None
    """What gives of the records so far all cells up to the next ones, where those depend on them."""
    references: Mapping[str, PlannedCell] = field(default_factory=dict)
    """Cells of `local` that run in addition, for losses to be compared with, by the work that they do."""
    note: str | None = None
    """Line that announces the cells which records have just added; None without any."""
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

    def with_added_cells(self, records: Sequence[Record], references_s: float = 0.0) -> Plan:
        """The plan with what the records so far add to it: cells that depend on them, or repeats."""
        if self.grow is None:
            return self.with_repeats(records, references_s)
        planned = {each.cell.cell_id for each in self.cells}
        more = [(cell, 0) for cell in self.grow(records) if cell.cell_id not in planned]
        grown = self._with(more)
        return replace(grown, references=reference_cells(grown.cells, self.machine))

    def with_repeats(self, records: Sequence[Record], references_s: float = 0.0) -> Plan:
        """Return the plan with the next repeats that were left open: those of one length.

        Repeats that have a record already, of a sweep that is resumed, are planned too. `references_s` are
        the seconds of references, which have no record.
        """
        if not self.open_cells:
            return self
        ran_out = {record.cell_id for record in records if record.status is Status.OUT_OF_MEMORY}
        left_open = {cell.cell_id: cell for cell in self.open_cells if cell.cell_id not in ran_out}
        own = [record for record in records if record.cell_id in left_open]
        spent_s = references_s + sum(each.wall_s for each in records)
        left_s = self.open_cells[0].measure.repeats_budget_s - spent_s
        chosen = next(
            (each for each in choose([*left_open.values()], processes_of(own), left_s) if each.gets), None
        )
        planned = {(each.cell.cell_id, each.repeat) for each in self.cells}
        turns = [(left_open[record.cell_id], record.repeat) for record in own]
        turns += [] if chosen is None else chosen.turns
        turns = [turn for turn in turns if (turn[0].cell_id, turn[1]) not in planned]
        return replace(
            self._with(dict.fromkeys(turns)),
            open_cells=self.open_cells if turns else (),
            note=None if chosen is None or not turns else chosen_line(chosen),
        )

    def _with(self, turns: Iterable[Turn]) -> Plan:
        """Return the plan with these processes at its end."""
        more = _in_order(turns, self.cells, self.roles, self.machine)
        return replace(self, cells=(*self.cells, *more), note=None)


def plan(raws: Sequence[Raw], machine: Machine, *, single: bool, default_strategies: bool = False) -> Plan:
    """Validate every cell, drop duplicates, repeat in turns. Cells whose repeats are left open have one each.

    With `default_strategies` nobody named a strategy: those that cannot share a sequence here are left out.
    Raises ConfigError for the first bad value; in a single run also for an illegal combination, which a sweep
    records as `unsupported`.
    """
    refuse_too_many([len(raws)])
    experiment = experiment_of(raws)
    if not experiment.needs_sharing:  # other experiments choose strategies and models themselves
        raws = with_one_engine(raws, machine)
    drops = default_strategies and not experiment.needs_sharing
    raws, left_out = for_lone_ranks(raws, machine) if drops else (raws, None)
    raws, base = with_fitting_base(raws, machine) if drops else (raws, None)
    cells = {cell.cell_id: cell for cell in experiment.cells(raws, machine)}
    for cell in cells.values():
        _refuse_failing_facts(cell)
    most = max(map(least_repeats, cells.values()))
    refuse_too_many([len(cells), most])
    turns = [turn for turn in in_turns([*cells.values()], range(most)) if turn[1] < least_repeats(turn[0])]
    first = raws[0]
    resume = values.resume("resume", first["resume"])
    folder = Path(values.text("sweep_dir", first["sweep_dir"]))
    lease = WhenTaken(values.choice("lease", first["lease"], LEASES))
    left_open = tuple(c for c in cells.values() if c.measure.repeats == AUTO and c.mode != PREDICT)
    planned = _in_order(turns, (), experiment.roles([*cells.values()]), machine)
    refused = next((each.reason for each in planned if each.reason is not None), None)
    if single and refused is not None:
        raise ConfigError(refused)
    return Plan(
        cells=tuple(planned),
        machine=machine,
        folder=folder,
        stored=stored_sweep(folder, resume),
        resume=resume,
        experiment=experiment,
        lease=lease,
        open_cells=left_open,
        grow=None if experiment.growing is None else experiment.growing(raws, machine),
        references=reference_cells(planned, machine),
        notes=(*filter(None, (left_out, base)), *choice_lines(raws, planned, machine)),
    )


def _in_order(
    turns: Iterable[Turn], before: Sequence[PlannedCell], roles: Mapping[str, Role], machine: Machine
) -> list[PlannedCell]:
    """Return what comes after the cells `before`; a cell that is among them is not examined again."""
    known = {each.cell.cell_id: each for each in before}
    found = []
    for order, (cell, repeat) in enumerate(turns, len(before)):
        name = cell.cell_id
        if name not in known:
            known[name] = planned_cell(cell, machine, roles.get(name, Role.CELL))
        found.append(replace(known[name], repeat=repeat, order=order))
    return found


def _refuse_failing_facts(cell: Cell) -> None:
    """Raises ConfigError where a plugin's facts fail: later, while cells run, that would end the sweep."""
    facts = STRATEGIES[cell.strategy]
    with STRATEGIES.plugin_errors_named(cell.strategy):
        answers: Mapping[str, Any] = {
            "refusals": "; ".join([*facts.refusals(cell), *facts.autocast_refusals(cell)]),
            "communication_bytes": facts.communication_bytes(cell),
            "schedule": facts.schedule(cell),
        }
        if not isinstance(answers["communication_bytes"], int):
            raise TypeError(
                f"communication_bytes must be a whole number, not {answers['communication_bytes']!r}"
            )
