"""Compare a plan with the sweep in its folder: cells that are missing, and records that count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from bench.common.environment import Environment, departures, describe
from bench.config import Cell, ConfigError, Resume
from bench.plan.cell_labels import CellLabels
from bench.plan.plan import Plan
from bench.plan.planned import PlannedCell
from bench.plan.stored import stored_sweep
from bench.record.record import Provenance, Record, Status, is_finding
from bench.record.store import RECORDS
from bench.request.packages import used_packages
from bench.strategies import STRATEGIES

MOST_NAMED = 2
"""Cells that a message names; more are counted."""
BECOME: Mapping[Resume, str] = {
    Resume.NEVER: "those cells run again",
    Resume.MATCHING: "those cells run again; resume=any keeps them",
    Resume.ANY: "kept, as resume=any asks",
}


@dataclass(frozen=True, slots=True)
class SweepStart:
    """A plan compared with the sweep that its folder holds."""

    plan: Plan
    """Cells that the folder's records add are among its cells."""
    pending: Sequence[PlannedCell]
    """Cells to begin with, in order."""
    records: Sequence[Record] = ()
    """Records of the folder that count for the plan."""
    lines: tuple[str, ...] = ()
    """Differences between the folder and the plan: cells, and what made the records."""
    is_whole: bool = True
    """Whether all cells of the folder's sweep are planned again."""


def sweep_start(plan: Plan) -> SweepStart:
    """Return where the plan starts in its folder, as that is now; writes nothing.

    Raises ConfigError where the folder's sweep has none of the plan's cells.
    """
    path = plan.folder / RECORDS
    size_bytes = path.stat().st_size if path.exists() else 0
    if size_bytes != plan.stored.size_bytes:  # another sweep ended here since the plan was made
        plan = replace(plan, stored=stored_sweep(plan.folder, plan.resume))
    stored = plan.stored
    if not stored.cells and not stored.records:
        return SweepStart(plan, plan.cells)
    left_out, added = _differences(plan)
    if stored.cells and len(left_out) == len({cell.cell_id for cell in stored.cells}):
        raise ConfigError(
            f"sweep_dir={plan.folder}: holds another sweep. Only there: {_named(left_out, plan)}; only in"
            f" this request: {_named(added, plan)}. To go on with the folder's own plan, add no word but"
            " resume=true; else name another folder"
        )
    kept, lines = kept_records(plan, stored.records), list[str]()
    if plan.grow is None:  # of a search the cells come one by one
        differing = {
            "only in the folder's earlier sweep, not run again": left_out,
            "new to the folder": added,
        }
        lines = [f"{_named(cells, plan)}: {what}" for what, cells in differing.items() if cells]
    plan, pending = with_missing(plan, kept.records)
    left_out, _ = _differences(plan)
    return SweepStart(plan, pending, kept.records, (*lines, *kept.lines), is_whole=not left_out)


def with_missing(
    plan: Plan, records: Sequence[Record], ran: Collection[str] = (), references_s: float = 0.0
) -> tuple[Plan, list[PlannedCell]]:
    """Return the plan and its missing cells; where none is missing, the plan with what the records add.

    A cell that `ran` just now is not run again, however it ended. `references_s` are the seconds of
    references, which have no record.
    """
    pending = _missing(plan, records, ran)
    while not pending and plan.is_open:
        before, plan = plan, plan.with_added_cells(records, references_s)
        pending = _missing(plan, records, ran)
        if plan.grow is not None and len(plan.cells) == len(before.cells):
            break
    return plan, pending


def _missing(plan: Plan, records: Sequence[Record], ran: Collection[str]) -> list[PlannedCell]:
    """Return the cells without a final record that did not run just now.

    A cell whose first process ran out of memory is not repeated.
    """
    done = {(each.cell_id, each.repeat) for each in records if is_finding(each.role, each.status)}
    out_of_memory = (each for each in records if each.status is Status.OUT_OF_MEMORY)
    ran_out = {each.cell_id for each in out_of_memory if not each.repeat}
    missing = [p for p in plan.cells if (p.cell.cell_id, p.repeat) not in done]
    return [p for p in missing if p.folder_name not in ran and not (p.repeat and p.cell.cell_id in ran_out)]


def _differences(plan: Plan) -> tuple[list[Cell], list[Cell]]:
    """Return the cells of the folder's sweep that are not planned, and the planned ones that it has not."""
    planned = {each.cell.cell_id: each.cell for each in plan.cells}
    stored = {cell.cell_id: cell for cell in plan.stored.cells}
    added = [cell for name, cell in planned.items() if name not in stored] if stored else []
    return [cell for name, cell in stored.items() if name not in planned], added


def _named(cells: Sequence[Cell], plan: Plan) -> str:
    """Return `2 cells (ulysses 8k, ring 8k)`, with labels as if all these cells were of one sweep."""
    labels = CellLabels([*plan.stored.cells, *(each.cell for each in plan.cells)])
    count = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
    more = ", ..." if len(cells) > MOST_NAMED else ""
    return f"{count} ({', '.join(map(labels.of, cells[:MOST_NAMED]))}{more})"


@dataclass(frozen=True, slots=True)
class KeptRecords:
    """What of a folder's records counts."""

    records: Sequence[Record]
    """At most one of each cell and repeat, in the order of the file."""
    lines: tuple[str, ...]
    """How many final ones were made with something else, by what that is, and what becomes of them."""


def kept_records(plan: Plan, records: Iterable[Record]) -> KeptRecords:
    """What counts for this plan. A line that is not kept stays in the file, as evidence.

    Of a cell that ran again the newest line counts, here as in every analysis. A synthetic one never does.
    """
    newest = {
        (record.cell_id, record.repeat): record
        for record in records
        if record.provenance is not Provenance.SYNTHETIC
    }
    cells = {planned.cell.cell_id: planned.cell for planned in plan.cells}
    if not newest:
        return KeptRecords([], ())
    here = cache(lambda strategy: describe(STRATEGIES.packages(strategy)))
    kept, departed = [], Counter[str]()
    for record in newest.values():
        cell = cells.get(record.cell_id)
        departed_in = _departures(cell, record, here(str(record.config["strategy"])))
        if not departed_in or plan.resume is Resume.ANY:
            kept.append(record)
        if departed_in and is_finding(record.role, record.status):
            departed[" and ".join(departed_in)] += 1
    lines = (
        f"{count} {'record' if count == 1 else 'records'} of {words}: {BECOME[plan.resume]}"
        for words, count in departed.items()
    )
    return KeptRecords(kept, tuple(lines))


def _departures(cell: Cell | None, record: Record, here: Environment) -> list[str]:
    """In what the record's origin is not the one that the cell would have now.

    Of a cell that a plan has not come to yet it is not known which packages it would use.
    """
    packages = frozenset[str]() if cell is None else used_packages(cell)
    is_predicted = record.provenance is Provenance.PREDICTED
    return departures(record.environment, here, None if is_predicted else packages)
