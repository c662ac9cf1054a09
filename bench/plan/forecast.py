"""Forecast of the time and memory of a plan's cells, before they run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.common.labels import duration_label
from bench.config import AUTO, Cell
from bench.cost.band import Fit
from bench.measure.timing.section import affordable_steps
from bench.plan.estimate import FIXED_S, START_S, Estimate, ExpectedStep
from bench.plan.local_cells import reason_to_skip
from bench.plan.plan import Plan
from bench.plan.planned import MemoryRoom, PlannedCell
from bench.plan.repeats import CellProcess, RepeatPlan, choose_repeats
from bench.plan.work import work_of
from bench.request.modes import starts_ranks


@dataclass(frozen=True, slots=True)
class CellForecast:
    """Expected time and memory of one cell of a plan."""

    planned: PlannedCell
    step: ExpectedStep | None
    """Estimated time of one step; None for an illegal cell, and if the time is unknown."""
    cell_s: float | None
    """Seconds from start to record if the ranks run; None for an illegal cell or without a step's time.

    For a cell that will run out of memory they contain no steps.
    """
    timed_steps: int | None
    """Number of timed steps that the budget allows; None if `step` is None."""

    @property
    def cell(self) -> Cell:
        return self.planned.cell

    @property
    def reason(self) -> str | None:
        """Reason why the cell cannot run; None for a legal cell."""
        return self.planned.reason

    @property
    def room(self) -> MemoryRoom | None:
        """Memory that a rank needs and may use; None if one of them is unknown."""
        return self.planned.room

    @property
    def runs(self) -> bool:
        """Whether the cell is legal and starts ranks; a predicted cell starts none."""
        return self.reason is None and starts_ranks(self.cell)

    @property
    def runs_out_of_memory(self) -> bool:
        """Whether the cell is predicted to run out of memory, in its first step at the latest."""
        return self.reason is None and self.room is not None and self.room.fit is Fit.OUT_OF_MEMORY

    @property
    def runs_to_end(self) -> bool:
        """Whether the cell is legal and not predicted to run out of memory."""
        return self.reason is None and not self.runs_out_of_memory

    @property
    def exceeds_timeout(self) -> bool:
        """Whether `measure.timeout_s` would end the cell before it is done."""
        return self.runs_to_end and self.cell_s is not None and self.cell_s > self.cell.measure.timeout_s


class Forecast:
    """Expected time and memory of the pending cells of a plan, its references and its repeats."""

    def __init__(self, plan: Plan, pending: Sequence[PlannedCell], estimate: Estimate) -> None:
        self.plan = plan
        self._estimate = estimate
        distinct = {planned.cell.cell_id: planned for planned in pending}
        forecasts = {cell_id: self._forecast_cell(planned) for cell_id, planned in distinct.items()}
        self.cells = tuple(replace(forecasts[planned.cell.cell_id], planned=planned) for planned in pending)
        pending_work = {work_of(planned.cell) for planned in distinct.values()}
        references = [reference for work, reference in plan.references.items() if work in pending_work]
        reasons = [reason_to_skip(reference) for reference in references]
        self.references = tuple(
            reference.cell for reference, reason in zip(references, reasons, strict=True) if reason is None
        )
        """References that run in addition to the cells; the losses of the cells are compared with theirs."""
        self.skipped_references = tuple(reason for reason in reasons if reason is not None)
        """A line for each reference that does not run, with its length and the reason."""
        left_open = [planned.cell for planned in distinct.values() if planned.cell.measure.repeats == AUTO]
        self.repeats = self._repeats(left_open) if left_open else []
        """Repeats of cells with `measure.repeats=auto`, chosen by estimated times of the first processes."""

    def _forecast_cell(self, planned: PlannedCell) -> CellForecast:
        cell, room = planned.cell, planned.room
        if planned.reason is not None:
            return CellForecast(planned, step=None, cell_s=None, timed_steps=None)
        step, cell_s = self._estimate.step(cell), self._estimate.measured_s(cell)
        timed = None if step is None else max(1, affordable_steps(cell.measure, step.seconds))
        if room is not None and room.fit is Fit.OUT_OF_MEMORY:
            cell_s = FIXED_S[cell.cluster.device]
        return CellForecast(planned, step, cell_s, timed)

    def _repeats(self, left_open: Sequence[Cell]) -> list[RepeatPlan]:
        """Return the repeats of a new sweep, and none for a resumed sweep, whose records decide on them."""
        planned_ids = {planned.cell.cell_id for planned in self.plan.cells}
        if planned_ids != {entry.cell.cell_id for entry in self.cells if not entry.planned.repeat}:
            return []
        ran = {
            entry.cell.cell_id: [CellProcess(entry.cell_s, entry.cell.tokens_per_step / entry.step.seconds)]
            for entry in self.cells
            if entry.runs_to_end and entry.cell_s is not None and entry.step is not None
        }
        return choose_repeats(left_open, ran, left_open[0].measure.repeats_budget_s - self.total_s)

    @property
    def illegal(self) -> list[CellForecast]:
        """Cells that cannot run."""
        return [entry for entry in self.cells if entry.reason is not None]

    @property
    def total_s(self) -> float:
        """Seconds of the references and all pending cells with a known time, without `repeats`.

        If no cell starts ranks, these are the seconds that measuring the cells would take.
        """
        known_s = sum(
            entry.cell_s or 0.0
            for entry in self._timed_cells
            if not (entry.runs_out_of_memory and entry.planned.repeat)  # such cells are not repeated
        )
        return START_S + known_s + sum(map(self.reference_s, self.references))

    @property
    def unknown_count(self) -> int:
        """Number of cells whose time is unknown and therefore not in `total_s`."""
        return sum(1 for entry in self._timed_cells if entry.cell_s is None)

    @property
    def is_predicted(self) -> bool:
        """Whether no cell starts ranks; the times are then those that measuring the cells would take."""
        return not any(entry.runs for entry in self.cells)

    @property
    def _timed_cells(self) -> list[CellForecast]:
        """Cells of which `total_s` is the time: those that start ranks, or all legal cells if none does."""
        return [entry for entry in self.cells if entry.runs or (entry.reason is None and self.is_predicted)]

    def reference_s(self, cell: Cell) -> float:
        """Return the largest number of seconds that a reference may take, up to its `measure.timeout_s`."""
        cell_s = self._estimate.measured_s(cell)
        return cell.measure.timeout_s if cell_s is None else min(cell_s, cell.measure.timeout_s)

    @property
    def bases(self) -> list[str]:
        """Sources of the step times in words, the most frequent source first."""
        counts = Counter(entry.step.basis for entry in self.cells if entry.step)
        return [basis for basis, _ in counts.most_common()]

    @property
    def duration(self) -> str:
        """Expected duration: `about 31 min by the cost model, 17 min of it for one process of each cell`.

        The text also states the number of cells whose time is unknown.
        """
        sources = f" by {' and '.join(self.bases)}" if self.bases else ""
        if all(entry.cell_s is None for entry in self._timed_cells):
            return f"an unknown time{sources}"
        repeats = {entry.planned.repeat for entry in self.cells}
        processes = "one process" if len(repeats) == 1 else f"{len(repeats)} processes"
        repeats_s = sum(repeat.added_s for repeat in self.repeats)
        total = f"about {duration_label(self.total_s + repeats_s)}{sources}"
        total += f", {duration_label(self.total_s)} of it" if repeats_s else ""
        unknown = f", and an unknown time for {self.unknown_count} of the cells" if self.unknown_count else ""
        return f"{total} for {processes} of each cell{unknown}"
