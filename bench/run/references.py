"""Compare the losses and gradient norms of a cell, step by step, with those of a reference of equal work.

Two cells do equal work if they train on the same tokens from the same parameters (`work_of`). The comparison
finds a strategy that is right in the checked step and wrong in the next one. It also finds a strategy that is
right only at a short length, in another engine, or while hooks watch it. If no cell of the sweep can be the
reference for some work, `local` runs in addition. Such a run is no result: its record is not stored.
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
from bench.measure.losses.section import GradientMatch, LossesSection
from bench.measure.quality.section import QualitySection
from bench.plan.local_cells import reason_to_skip
from bench.plan.planned import PlannedCell
from bench.plan.work import MAX_COMPARED_STEPS, REFERENCE_STRATEGY, is_base, work_of
from bench.record.gradient_agreement import match_gradients, match_moments
from bench.record.position_agreement import describe_departure, match_positions
from bench.record.quality_agreement import describe_quality_departure, match_quality
from bench.record.record import Record, Status
from bench.record.trajectory_noise import first_departure, limit_for, movement_weight, signals_of
from bench.run.cell.launcher import Launcher
from bench.run.cell.outcome import as_wrong_result
from bench.run.cell.rank_watch import SILENT, Listener
from bench.run.cell.run import CellInterrupted, SharedSections, run

FOLDER = "references"


@dataclass(frozen=True, slots=True)
class Reference:
    """Cell that other cells of equal work are compared with, and its results."""

    cell: Cell
    losses: LossesSection
    quality: QualitySection | None


class Trajectories:
    """References of a sweep: for each kind of work, the cell whose losses other cells are compared with."""

    def __init__(self) -> None:
        self._references: dict[str, Reference] = {}

    def compare(self, cell: Cell, record: Record) -> Record:
        """Compare a cell with the reference of its work.

        The first sound cell of some work is compared with nothing and becomes the reference. So does the
        first cell of `local`, as a difference from an earlier strategy would not be the fault of `local`.

        Returns:
            The record with the comparison. It is a wrong result if the cell departed from the reference, and
            is unchanged if nothing was compared.
        """
        losses = record.losses
        if record.status is not Status.OK or losses is None:
            return record
        reference = self._references.get(work_of(cell))
        noise = {} if record.objective is None else record.objective.noise
        gradient_noise = {} if record.objective is None else record.objective.gradient_noise
        if reference is not None and not _replaces(cell, reference.cell):
            steps = min(len(losses.loss), len(reference.losses.loss), MAX_COMPARED_STEPS)
            limit = limit_for(cell.dtype, noise)
            losses = replace(
                losses,
                compared_with=reference.cell.cell_id,
                compared_steps=steps,
                compared_within=asdict(limit),
                gradient_match=match_gradients(
                    losses.gradients, reference.losses.gradients, cell, gradient_noise
                ),
                moment_match=match_moments(losses.moment, reference.losses.moment, cell, gradient_noise),
                position_match=match_positions(losses.by_position, reference.losses.by_position, limit.loss),
            )
            quality = match_quality(record.quality, reference.quality, reference.cell.cell_id, limit.loss)
            record = replace(record, losses=losses, quality=quality)
            record = replace(record, checks=checks(cell, record.sections))
            compared, reference_signals = signals_of(losses, steps), signals_of(reference.losses, steps)
            departure = describe_quality_departure(quality) or first_departure(
                compared, reference_signals, limit, movement_weight(cell.dtype, limit)
            )
            departure = departure or _gradient_departure(losses.gradient_match)
            departure = departure or _gradient_departure(losses.moment_match)
            departure = departure or describe_departure(losses.position_match, cell.seq_len)
            if departure is not None:
                reason = f"{departure} of {reference.cell.strategy} on the same data"
                return as_wrong_result(record, reason)
        self._offer(cell, record)
        return record

    def has_reference(self, work: str) -> bool:
        """Return whether this work has a reference."""
        return work in self._references

    def add_finished(self, cells: Sequence[Cell], records: Sequence[Record]) -> None:
        """Take references from the cells of a resumed sweep that have finished before."""
        planned = {cell.cell_id: cell for cell in cells}
        for record in records:
            if record.status is Status.OK and record.losses is not None and record.cell_id in planned:
                self._offer(planned[record.cell_id], record)

    def _offer(self, cell: Cell, record: Record) -> None:
        """Make a cell the reference of its work if there is none yet, or if the cell replaces it."""
        work = work_of(cell)
        reference = self._references.get(work)
        if record.losses is not None and (reference is None or _replaces(cell, reference.cell)):
            self._references[work] = Reference(cell, record.losses, record.quality)


def _replaces(cell: Cell, reference: Cell) -> bool:
    """Return whether `cell` is `local` in our training loop (`is_base`) and the present reference is not."""
    return is_base(cell) and not is_base(reference)


def _gradient_departure(match: GradientMatch | None) -> str | None:
    """Describe the gradient that is nearest to its limit, if it exceeds the limit."""
    if match is None or match.is_within:
        return None
    size = (
        "missing or not finite"
        if match.difference is None
        else f"off by {match.difference:.1e} of its length"
    )
    what = (
        "step 0: the gradient"
        if match.steps == 1
        else f"after {match.steps} steps: the mean gradient (AdamW's first moment)"
    )
    return f"{what} of {match.parameter} is {size} (limit {match.limit:.1e}) against that"


@dataclass(slots=True)
class References:
    """Runs each planned reference at most once, just before the first cell of the same work."""

    launcher: Launcher
    folder: Path
    say: Callable[[str], None]
    show: Callable[[PlannedCell], AbstractContextManager[Listener]] = lambda _: nullcontext(SILENT)
    """Context that shows a reference while it runs."""
    total_s: float = 0.0
    """Seconds that references have taken so far."""
    tried: set[str] = field(default_factory=set)
    """Ids of the references that have run or were skipped, for example because they do not fit in memory."""

    def run_missing(
        self, reference: PlannedCell, trajectories: Trajectories, shared: SharedSections
    ) -> Record | None:
        """Run a planned reference and return its record.

        It does not run if its work has a reference, if it was tried before, or if it may not fit in memory.
        """
        cell = reference.cell
        if cell.cell_id in self.tried or trajectories.has_reference(work_of(cell)):
            return None
        self.tried.add(cell.cell_id)
        reason = reason_to_skip(reference)
        if reason is not None:
            self.say(reason)
            return None
        self.say(
            f"{length_label(cell.seq_len)}: {REFERENCE_STRATEGY} runs first, for at most"
            f" {duration_label(cell.measure.timeout_s)}, as the reference for the losses of the other cells"
        )
        try:
            with self.show(reference) as listener:
                record = run(reference, self.launcher, self.folder / FOLDER, listener=listener, shared=shared)
        except CellInterrupted:
            raise KeyboardInterrupt from None  # the record of a reference is not stored
        self.total_s += record.wall_s or 0.0
        if record.status is Status.OK:
            trajectories.compare(cell, record)
        else:
            self.say(
                f"{length_label(cell.seq_len)}: {REFERENCE_STRATEGY} gave no reference, {record.status}:"
                f" {record.reason}; cells are compared with the first sound one instead"
            )
        return record
