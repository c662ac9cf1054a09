"""Runs `local` for work of which a sweep has no cell that others could be compared with.

Such a cell is no result: its record is not stored, and its budget is stated.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from bench.common.labels import duration_label, length_label
from bench.plan.local_cells import why_not_tried
from bench.plan.planned import PlannedCell
from bench.plan.work import REFERENCE_STRATEGY, work_of
from bench.record.record import Status
from bench.run.cell.launcher import Launcher
from bench.run.cell.rank_watch import SILENT, Listener
from bench.run.cell.run import CellInterrupted, SharedSections, run
from bench.run.cell.trajectory import Trajectories

FOLDER = "references"


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
