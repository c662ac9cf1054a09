"""Compare a plan with the sweep in its folder: find missing cells and select the records that count.

A cell is missing while it has no final record, that is one whose status is a result (`is_result`). A cell
that failed is missing, so a resumed sweep runs it again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from bench.common.environment import Environment, describe_environment, environment_changes
from bench.config import Cell, ConfigError, Resume
from bench.plan.cell_labels import CellLabels
from bench.plan.plan import Plan
from bench.plan.planned import PlannedCell
from bench.plan.stored import stored_sweep
from bench.record.record import Provenance, Record, Status, is_result
from bench.record.store import RECORDS
from bench.request.packages import used_packages
from bench.strategies import STRATEGIES

MAX_NAMED_CELLS = 2
"""Largest number of cells that a message names; it only counts the others."""
CONSEQUENCES: Mapping[Resume, str] = {
    Resume.NEVER: "their cells run again",
    Resume.MATCHING: "their cells run again; with resume=any the records are kept",
    Resume.ANY: "kept because of resume=any",
}
"""Consequence for records that were made with other code, packages or devices."""


@dataclass(frozen=True, slots=True)
class SweepStart:
    """Plan of a sweep after comparison with the folder: what is missing, and which records count."""

    plan: Plan
    """The plan, with the cells that the folder's records add to it."""
    pending: Sequence[PlannedCell]
    """Missing cells to run first, in order."""
    records: Sequence[Record] = ()
    """Records of the folder that count for the plan."""
    lines: tuple[str, ...] = ()
    """Lines to print: cells that only the folder or only the plan has, and records of another origin."""
    covers_folder: bool = True
    """Whether the plan contains all cells of the folder's sweep."""


def sweep_start(plan: Plan) -> SweepStart:
    """Compare a plan with the present content of its folder, and write nothing.

    Raises:
        ConfigError: The folder has a sweep, and the plan contains none of its cells.
    """
    path = plan.folder / RECORDS
    size_bytes = path.stat().st_size if path.exists() else 0
    if size_bytes != plan.stored.size_bytes:  # another sweep has written here since the plan was made
        plan = replace(plan, stored=stored_sweep(plan.folder, plan.resume))
    stored = plan.stored
    if not stored.cells and not stored.records:
        return SweepStart(plan, plan.cells)
    dropped, added = _differences(plan)
    if stored.cells and len(dropped) == len({cell.cell_id for cell in stored.cells}):
        raise ConfigError(
            f"sweep_dir={plan.folder}: contains another sweep. Only in the folder:"
            f" {_label_cells(dropped, plan)}; only in this request: {_label_cells(added, plan)}. To continue"
            " the folder's sweep, give only resume=true and sweep_dir; for a new sweep, name another folder"
        )
    kept, lines = kept_records(plan, stored.records), list[str]()
    if plan.choose_cells is None:  # a search plans its cells one by one
        differences = {
            "only in the folder's earlier sweep, so they do not run": dropped,
            "new in this request": added,
        }
        lines = [f"{_label_cells(cells, plan)}: {place}" for place, cells in differences.items() if cells]
    plan, pending = plan_missing_cells(plan, kept.records)
    dropped, _ = _differences(plan)
    return SweepStart(plan, pending, kept.records, (*lines, *kept.lines), covers_folder=not dropped)


def plan_missing_cells(
    plan: Plan, records: Sequence[Record], attempted: Collection[str] = (), references_s: float = 0.0
) -> tuple[Plan, list[PlannedCell]]:
    """Return the plan and its missing cells, after records have added cells if none was missing.

    While no cell is missing and the plan is open, records add cells or repeats. If they have nothing to add,
    no missing cell is returned, and the sweep is complete.

    Args:
        plan: The plan so far.
        records: Records that count for the plan.
        attempted: Folder names of cells that this run has started; they are not missing, however they ended.
        references_s: Seconds that references took, which have no record.
    """
    pending = _missing(plan, records, attempted)
    while not pending and plan.is_open:
        count, plan = len(plan.cells), plan.with_added_cells(records, references_s)
        pending = _missing(plan, records, attempted)
        if plan.choose_cells is not None and len(plan.cells) == count:
            break
    return plan, pending


def _missing(plan: Plan, records: Sequence[Record], attempted: Collection[str]) -> list[PlannedCell]:
    """Return the cells that have no final record and that this run has not attempted.

    A cell whose first run ran out of memory is not repeated.
    """
    final = {(record.cell_id, record.repeat) for record in records if is_result(record.role, record.status)}
    out_of_memory = {
        record.cell_id for record in records if record.status is Status.OUT_OF_MEMORY and not record.repeat
    }
    return [
        planned
        for planned in plan.cells
        if (planned.cell.cell_id, planned.repeat) not in final
        and planned.folder_name not in attempted
        and not (planned.repeat and planned.cell.cell_id in out_of_memory)
    ]


def _differences(plan: Plan) -> tuple[list[Cell], list[Cell]]:
    """Return the cells that only the folder's sweep has, and the cells that only the plan adds to a sweep."""
    planned_cells = {planned.cell.cell_id: planned.cell for planned in plan.cells}
    stored = {cell.cell_id: cell for cell in plan.stored.cells}
    added = [cell for name, cell in planned_cells.items() if name not in stored] if stored else []
    return [cell for name, cell in stored.items() if name not in planned_cells], added


def _label_cells(cells: Sequence[Cell], plan: Plan) -> str:
    """Return text such as `2 cells (ulysses 8k, ring 8k)`, with labels unique in folder and plan."""
    labels = CellLabels([*plan.stored.cells, *(planned.cell for planned in plan.cells)])
    count = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
    more = ", ..." if len(cells) > MAX_NAMED_CELLS else ""
    return f"{count} ({', '.join(map(labels.label, cells[:MAX_NAMED_CELLS]))}{more})"


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """Records of a folder that count for a plan."""

    records: Sequence[Record]
    """At most one record for each cell and repeat, in the order of the file."""
    lines: tuple[str, ...]
    """Lines on final records of another origin: their number, what differs, and the consequence."""


def kept_records(plan: Plan, records: Iterable[Record]) -> KeptRecords:
    """Select the records that count for a plan. The others stay in the file as evidence.

    The newest record of a cell and repeat counts, as in every analysis. A synthetic record never counts. One
    of another origin (code, packages, devices) counts only with resume=any.
    """
    newest = {
        (record.cell_id, record.repeat): record
        for record in records
        if record.provenance is not Provenance.SYNTHETIC
    }
    cells = {planned.cell.cell_id: planned.cell for planned in plan.cells}
    if not newest:
        return KeptRecords([], ())
    environment_of = cache(lambda strategy: describe_environment(STRATEGIES.packages(strategy)))
    kept, differing = [], Counter[str]()
    for record in newest.values():
        cell = cells.get(record.cell_id)
        differences = _origin_differences(cell, record, environment_of(str(record.config["strategy"])))
        if not differences or plan.resume is Resume.ANY:
            kept.append(record)
        if differences and is_result(record.role, record.status):
            differing[" and ".join(differences)] += 1
    lines = (
        f"{count} {'record' if count == 1 else 'records'} of {differences}: {CONSEQUENCES[plan.resume]}"
        for differences, count in differing.items()
    )
    return KeptRecords(kept, tuple(lines))


def _origin_differences(cell: Cell | None, record: Record, here: Environment) -> list[str]:
    """Return the differences between the environment of a record and the environment `here`.

    `cell` is None if the plan does not contain the record's cell, or not yet. Of the packages, only torch is
    compared then, because it is not known which others the cell would use.
    """
    packages = frozenset[str]() if cell is None else used_packages(cell)
    is_predicted = record.provenance is Provenance.PREDICTED
    return environment_changes(record.environment, here, None if is_predicted else packages)
