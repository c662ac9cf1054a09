"""References of a sweep: whether a cell trained as another cell of the same work did, step by step.

A strategy that is right in the checked step and wrong in the next leaves the others' trajectory of loss and
gradient norm. So does one that is right only at a short length, in another engine, or while it is looked at.
For work of which a sweep has no cell that others could be compared with, `local` runs. Such a cell is no
result: its record is not stored, and its budget is stated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

from msgspec.structs import replace

from bench.common.labels import duration_label, length_label
from bench.config import Cell
from bench.measure import checks
from bench.measure.losses.section import LossesSection
from bench.plan.local_cells import why_not_tried
from bench.plan.planned import PlannedCell
from bench.plan.work import MAX_COMPARED_STEPS, REFERENCE_STRATEGY, is_base, work_of
from bench.record.record import Record, Status
from bench.record.trajectory_noise import first_departure, limit_for, moved_for, signals_of
from bench.run.cell.launcher import Launcher
from bench.run.cell.outcome import as_wrong_result
from bench.run.cell.rank_watch import SILENT, Listener
from bench.run.cell.run import CellInterrupted, SharedSections, run

FOLDER = "references"


class Trajectories:
    """The references of one sweep, by the work that they did."""

    def __init__(self) -> None:
        self._references: dict[str, tuple[Cell, LossesSection]] = {}

    def compare(self, cell: Cell, record: Record) -> Record:
        """Return the record with what it was compared with; a wrong result where it departed from that.

        The first sound cell of a work is compared with nothing, and is what the next are compared with. So is
        the first of `local`: it is not blamed for leaving a strategy that came before it.
        """
        losses = record.losses
        if record.status is not Status.OK or losses is None:
            return record
        reference = self._references.get(work_of(cell))
        noise = {} if record.objective is None else record.objective.noise
        if reference is not None and not _replaces(cell, reference[0]):
            of, right = reference
            steps = min(len(losses.loss), len(right.loss), MAX_COMPARED_STEPS)
            limit = limit_for(cell.dtype, noise)
            losses = replace(
                losses, compared_with=of.cell_id, compared_steps=steps, compared_within=asdict(limit)
            )
            record = replace(record, losses=losses)
            record = replace(record, checks=checks(cell, record.sections))
            compared, reference_signals = signals_of(losses, steps), signals_of(right, steps)
            departure = first_departure(compared, reference_signals, limit, moved_for(cell.dtype, limit))
            if departure is not None:
                return as_wrong_result(record, f"{departure} of {of.strategy} on the same data")
        self._keep(cell, losses)
        return record

    def has_reference(self, work: str) -> bool:
        """Return whether there is a reference for this work."""
        return work in self._references

    def keep_finished(self, cells: Sequence[Cell], records: Sequence[Record]) -> None:
        """Take references from the records of a sweep that is resumed."""
        planned = {cell.cell_id: cell for cell in cells}
        for record in records:
            if record.status is Status.OK and record.losses is not None and record.cell_id in planned:
                self._keep(planned[record.cell_id], record.losses)

    def _keep(self, cell: Cell, losses: LossesSection) -> None:
        work = work_of(cell)
        before = self._references.get(work)
        if before is None or _replaces(cell, before[0]):
            self._references[work] = cell, losses


def _replaces(cell: Cell, reference: Cell) -> bool:
    """Whether others are better compared with this cell."""
    return is_base(cell) and not is_base(reference)


@dataclass(slots=True)
class References:
    """Runs each planned reference once, when the first other cell of its work is about to run."""

    launcher: Launcher
    folder: Path
    say: Callable[[str], None]
    show: Callable[[PlannedCell], AbstractContextManager[Listener]] = lambda _: nullcontext(SILENT)
    """Shows a reference while it runs."""
    took_s: float = 0.0
    """Seconds of the references so far."""
    tried: set[str] = field(default_factory=set)
    """Ids of the references that have run or were found too large."""

    def run_missing(self, reference: PlannedCell, trajectories: Trajectories, shared: SharedSections) -> None:
        """Give the trajectories a planned reference, unless its work has one already or it was tried."""
        cell = reference.cell
        if cell.cell_id in self.tried or trajectories.has_reference(work_of(cell)):
            return
        self.tried.add(cell.cell_id)
        reason = why_not_tried(reference)
        if reason is not None:
            self.say(reason)
            return
        self.say(
            f"{length_label(cell.seq_len)}: {REFERENCE_STRATEGY} runs first, for at most"
            f" {duration_label(cell.measure.timeout_s)}, because others are compared with its losses"
        )
        try:
            with self.show(reference) as listener:
                record = run(reference, self.launcher, self.folder / FOLDER, listener=listener, shared=shared)
        except CellInterrupted:
            raise KeyboardInterrupt from None  # its record is none of the sweep's
        self.took_s += record.wall_s or 0.0
        if record.status is Status.OK:
            trajectories.compare(cell, record)
        else:
            self.say(f"{length_label(cell.seq_len)}: no reference, {record.status}: {record.reason}")
