"""The plan of a sweep: its cells in the order in which they run, all checked before the first one starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from pathlib import Path
from typing import Any

from bench.attention.kernel_facts import CUDNN
from bench.common.environment import Machine
from bench.config import AUTO, LEASE_POLICIES, Cell, ConfigError, LeasePolicy, Resume
from bench.measure.quality.section import is_scored
from bench.plan.auto_choices import choice_lines
from bench.plan.experiments import EXPERIMENTS, Experiment, experiment_of
from bench.plan.experiments.max_length import CellChooser
from bench.plan.local_cells import reference_cells, with_fitting_base
from bench.plan.planned import PlannedCell, planned_cell
from bench.plan.repeats import (
    CellRepeat,
    choose_repeats,
    chosen_line,
    interleave,
    least_repeats,
    processes_of,
)
from bench.plan.stored import StoredSweep, stored_sweep
from bench.record.record import Record, Role, Status
from bench.request import values
from bench.request.checkpoint_files import left_out_line
from bench.request.choices import Raw
from bench.request.kernel_choice import parity_fault
from bench.request.modes import PREDICT
from bench.request.open_choices import with_one_engine, without_sequence_sharing
from bench.request.values import refuse_too_many
from bench.strategies import STRATEGIES
from bench.training.questions import questions_line
from bench.training.text_files import files_line


@dataclass(frozen=True, slots=True)
class Plan:
    """Cells of a sweep in the order in which they run, and settings and stored records of the sweep."""

    cells: tuple[PlannedCell, ...]
    """Cells in the order in which they run."""
    machine: Machine
    """Machine that the cells are planned for."""
    folder: Path
    """Folder of the records and the report."""
    stored: StoredSweep
    """Sweep that the folder already contains."""
    resume: Resume
    """Rule for which stored records stand for a cell, so that it does not run again."""
    experiment: Experiment = EXPERIMENTS["none"]
    """Experiment that chose the cells."""
    lease: LeasePolicy = LeasePolicy.WAIT
    """Behaviour while another sweep runs on the same devices."""
    open_cells: tuple[Cell, ...] = ()
    """Cells with `measure.repeats=auto`, which may be repeated after every cell has run once."""
    choose_cells: CellChooser | None = None
    """Function that returns all cells that the records so far lead to.

    None if the records add no cells (repeats of the planned cells apart).
    """
    references: Mapping[str, PlannedCell] = field(default_factory=dict)
    """References that run in addition, by their work (`work_of`)."""
    note: str | None = None
    """Line that announces the repeats or the other kernel of cells that were just added; else None."""
    notes: tuple[str, ...] = ()
    """Notes on choices made and cells left out."""
    plan_again: Callable[[Machine], Plan] | None = None
    """Function that plans the same requests for another machine, if the first parity check on cuDNN fails.

    None if that check has passed, or if `kernel=auto` chose cuDNN for no cell.
    """

    @property
    def roles(self) -> dict[str, Role]:
        """Role of each cell by its id."""
        return {planned.cell.cell_id: planned.role for planned in self.cells}

    @property
    def is_open(self) -> bool:
        """Whether further records may add cells or repeats to the plan."""
        return self.choose_cells is not None or bool(self.open_cells)

    def with_added_cells(self, records: Sequence[Record], references_s: float = 0.0) -> Plan:
        """Return the plan with the cells or repeats that follow from the records so far.

        Args:
            records: Records so far.
            references_s: Seconds that references have taken so far. They have no record, but their time
                counts towards the budget of repeats.
        """
        if self.choose_cells is None:
            return self.with_more_repeats(records, references_s)
        planned = {entry.cell.cell_id for entry in self.cells}
        more = [(cell, 0) for cell in self.choose_cells(records) if cell.cell_id not in planned]
        grown = self._with_cells(more)
        return replace(grown, references=reference_cells(grown.cells, self.machine))

    def with_more_repeats(self, records: Sequence[Record], references_s: float = 0.0) -> Plan:
        """Return the plan with the next repeats of two of `open_cells`, which the budget allows.

        If the sweep was resumed, the plan also gets the repeats that have a record already. Without any such
        repeat, `open_cells` of the returned plan is empty. The arguments are those of `with_added_cells`.
        """
        if not self.open_cells:
            return self
        ran_out = {record.cell_id for record in records if record.status is Status.OUT_OF_MEMORY}
        repeatable = {cell.cell_id: cell for cell in self.open_cells if cell.cell_id not in ran_out}
        relevant = [record for record in records if record.cell_id in repeatable]
        spent_s = references_s + sum(record.wall_s for record in records)
        budget_s = self.open_cells[0].measure.repeats_budget_s - spent_s
        repeat_plans = choose_repeats([*repeatable.values()], processes_of(relevant), budget_s)
        chosen = next((repeat_plan for repeat_plan in repeat_plans if repeat_plan.added), None)
        planned = {(entry.cell.cell_id, entry.repeat) for entry in self.cells}
        repeats = [(repeatable[record.cell_id], record.repeat) for record in relevant]
        repeats += [] if chosen is None else chosen.cell_repeats
        repeats = [(cell, repeat) for cell, repeat in repeats if (cell.cell_id, repeat) not in planned]
        return replace(
            self._with_cells(dict.fromkeys(repeats)),
            open_cells=self.open_cells if repeats else (),
            note=None if chosen is None or not repeats else chosen_line(chosen),
        )

    def _with_cells(self, repeats: Iterable[CellRepeat]) -> Plan:
        """Return the plan with these repeats at its end and without `note`."""
        added = [*repeats]
        roles = {**self.experiment.roles([cell for cell, _ in added]), **self.roles}
        more = _plan_repeats(added, self.cells, roles, self.machine)
        return replace(self, cells=(*self.cells, *more), note=None)


def plan(
    requests: Sequence[Raw],
    machine: Machine,
    *,
    single: bool,
    default_strategies: bool = False,
    stored: StoredSweep | None = None,
) -> Plan:
    """Return the plan of a sweep: every cell checked and planned once per repeat, with interleaved repeats.

    A cell that several requests ask for is planned once. A cell with `measure.repeats=auto` gets one repeat;
    records decide on further ones.

    Args:
        requests: One composed configuration per cell.
        machine: Machine that the cells are planned for.
        single: Refuse an illegal cell, which a sweep records as `unsupported`.
        default_strategies: The user named no strategy. If no ranks share a sequence here, the strategies that
            share sequences are left out.
        stored: Sweep in the folder, if it was read before.

    Raises:
        ConfigError: A value is invalid, or a single cell is illegal.
    """
    refuse_too_many([len(requests)])
    first = requests[0]
    resume = values.resume("resume", first["resume"])
    folder = Path(values.text("sweep_dir", first["sweep_dir"]))
    lease = LeasePolicy(values.choice("lease", first["lease"], LEASE_POLICIES))
    stored = stored_sweep(folder, resume) if stored is None else stored
    plan_again = partial(plan, requests, single=single, default_strategies=default_strategies, stored=stored)
    is_auto = {request["kernel"] for request in requests} & {AUTO, CUDNN} == {AUTO}
    is_checked = any(parity_fault(record) == "" for record in stored.records)
    if stored.cells and not any(cell.kernel == CUDNN for cell in stored.cells):
        machine = replace(machine, cudnn_fault=f"the sweep of this folder does not run on {CUDNN}")
    experiment = experiment_of(requests)
    if not experiment.needs_sharing:  # experiments choose strategies and models themselves
        requests = with_one_engine(requests, machine)
    adapts = default_strategies and not experiment.needs_sharing
    requests, left_out_note = without_sequence_sharing(requests, machine) if adapts else (requests, None)
    requests, base_note = with_fitting_base(requests, machine) if adapts else (requests, None)
    cells = {cell.cell_id: cell for cell in experiment.cells(requests, machine)}
    for cell in cells.values():
        _refuse_failing_facts(cell)
    repeat_count = max(map(least_repeats, cells.values()))
    refuse_too_many([len(cells), repeat_count])
    repeats = [
        (cell, repeat)
        for cell, repeat in interleave([*cells.values()], range(repeat_count))
        if repeat < least_repeats(cell)
    ]
    kernels = {cell.kernel for cell in cells.values()}
    open_cells = tuple(c for c in cells.values() if c.measure.repeats == AUTO and c.mode != PREDICT)
    planned = _plan_repeats(repeats, (), experiment.roles([*cells.values()]), machine)
    reason = next((entry.reason for entry in planned if entry.reason is not None), None)
    if single and reason is not None:
        raise ConfigError(reason)
    return Plan(
        cells=tuple(planned),
        machine=machine,
        folder=folder,
        stored=stored,
        resume=resume,
        experiment=experiment,
        lease=lease,
        open_cells=open_cells,
        choose_cells=None
        if experiment.make_cell_chooser is None
        else experiment.make_cell_chooser(requests, machine),
        references=reference_cells(planned, machine),
        plan_again=plan_again if is_auto and not is_checked and CUDNN in kernels else None,
        notes=(
            *filter(None, (left_out_note, base_note, *_folder_lines([*cells.values()]))),
            *choice_lines(requests, planned, machine),
        ),
    )


def _folder_lines(cells: Sequence[Cell]) -> list[str | None]:
    """Return a line for every folder of `data.path` and `model.path`, and for every file of questions."""
    read = [cell for cell in cells if cell.workload.trains and cell.data.name == "text" and cell.data.path]
    asked = [(str(cell.data.path), cell.quality.questions) for cell in read if is_scored(cell)]
    names = dict.fromkeys(str(cell.data.path) for cell in read)
    models = {cell.model.path: cell.model for cell in cells if cell.model.path is not None}
    questions = starmap(questions_line, dict.fromkeys(asked))
    return [*map(files_line, names), *questions, *map(left_out_line, models.values())]


def _plan_repeats(
    repeats: Iterable[CellRepeat],
    earlier: Sequence[PlannedCell],
    roles: Mapping[str, Role],
    machine: Machine,
) -> list[PlannedCell]:
    """Return a planned cell for each repeat, to run after the planned cells in `earlier`.

    The legality and the memory of a cell are determined once, for all of its repeats.
    """
    known = {entry.cell.cell_id: entry for entry in earlier}
    planned = []
    for order, (cell, repeat) in enumerate(repeats, len(earlier)):
        cell_id = cell.cell_id
        if cell_id not in known:
            known[cell_id] = planned_cell(cell, machine, roles.get(cell_id, Role.CELL))
        planned.append(replace(known[cell_id], repeat=repeat, order=order))
    return planned


def _refuse_failing_facts(cell: Cell) -> None:
    """Raise ConfigError if a function of the strategy's facts fails; a later failure would end the sweep."""
    facts = STRATEGIES[cell.strategy]
    with STRATEGIES.name_plugin_in_errors(cell.strategy):
        "; ".join([*facts.refusals(cell), *facts.autocast_refusals(cell)])  # fails unless all are texts
        payload_bytes: Any = facts.communication_bytes(cell)
        facts.schedule(cell)
        if not isinstance(payload_bytes, int):
            raise TypeError(f"communication_bytes must be a whole number, not {payload_bytes!r}")
