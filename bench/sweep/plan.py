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
from bench.record import Role, Status
from bench.request import values
from bench.request.choices import Raw
from bench.request.legality import refusal
from bench.request.lone_rank import for_lone_ranks
from bench.request.one_engine import with_one_engine
from bench.request.target import PREDICT
from bench.request.values import refuse_too_many
from bench.strategies import STRATEGIES
from bench.sweep.auto_choices import choice_lines
from bench.sweep.bases import with_fitting_base
from bench.sweep.repeats import Turn, choose, chosen_line, in_turns, least_repeats, processes_of


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

    def grown(self, records: Sequence[Mapping[str, Any]], beside_s: float = 0.0) -> Plan:
        """The plan with what the records so far add to it: cells that depend on them, or repeats."""
        if self.grow is None:
            return self.repeated(records, beside_s)
        planned = {each.cell.cell_id for each in self.cells}
        more = [(cell, 0) for cell in self.grow(records) if cell.cell_id not in planned]
        return replace(self, cells=(*self.cells, *_in_order(more, len(self.cells), {})), note=None)

    def repeated(self, records: Sequence[Mapping[str, Any]], beside_s: float = 0.0) -> Plan:
        """Return the plan with the next repeats that were left open: those of one length.

        Repeats that have a record already, of a sweep that is resumed, are planned too. `beside_s` are the
        seconds of cells without a record of the sweep's own.
        """
        if not self.open_cells:
            return self
        ran_out = {record["cell_id"] for record in records if record["status"] == Status.OUT_OF_MEMORY}
        left_open = {cell.cell_id: cell for cell in self.open_cells if cell.cell_id not in ran_out}
        own = [record for record in records if record["cell_id"] in left_open]
        spent_s = beside_s + sum(float(each["wall_s"]) for each in records)
        left_s = self.open_cells[0].measure.repeats_budget_s - spent_s
        chosen = next(
            (each for each in choose([*left_open.values()], processes_of(own), left_s) if each.gets), None
        )
        planned = {(each.cell.cell_id, each.repeat) for each in self.cells}
        turns = [(left_open[record["cell_id"]], int(record["repeat"])) for record in own]
        turns += [] if chosen is None else chosen.turns
        turns = [turn for turn in turns if (turn[0].cell_id, turn[1]) not in planned]
        return replace(
            self,
            cells=(*self.cells, *_in_order(dict.fromkeys(turns), len(self.cells), self.roles)),
            open_cells=self.open_cells if turns else (),
            note=None if chosen is None or not turns else chosen_line(chosen),
        )


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
        if single and (reason := refusal(cell)) is not None:
            raise ConfigError(reason)
    most = max(map(least_repeats, cells.values()))
    refuse_too_many([len(cells), most])
    turns = [turn for turn in in_turns([*cells.values()], range(most)) if turn[1] < least_repeats(turn[0])]
    first = raws[0]
    resume = values.resume("resume", first["resume"])
    lease = WhenTaken(values.choice("lease", first["lease"], LEASES))
    left_open = tuple(c for c in cells.values() if c.measure.repeats == AUTO and c.mode != PREDICT)
    return Plan(
        cells=tuple(_in_order(turns, 0, experiment.roles([*cells.values()]))),
        folder=Path(values.text("sweep_dir", first["sweep_dir"])),
        resume=resume,
        lease=lease,
        open_cells=left_open,
        grow=None if experiment.growing is None else experiment.growing(raws, machine),
        notes=(
            *filter(None, (left_out, base)),
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
