"""What a plan takes before it runs: each cell's seconds and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.common.labels import duration_label
from bench.common.statistics import interval_rank
from bench.config import AUTO, Cell
from bench.cost.band import Fit
from bench.measure.timing.section import affordable_steps
from bench.plan.estimate import FIXED_S, START_S, Estimate, Expected
from bench.plan.local_cells import why_not_tried
from bench.plan.plan import Plan
from bench.plan.planned import PlannedCell, Room
from bench.plan.repeats import Process, Repeats, choose
from bench.plan.work import work_of
from bench.request.modes import starts_ranks

INTERVAL_STEPS = next(n for n in range(1, 100) if interval_rank(n))
"""As many timed steps as an interval takes."""


@dataclass(frozen=True, slots=True)
class CellForecast:
    """What is expected of one cell of a plan."""

    planned: PlannedCell
    step: Expected | None
    cell_s: float | None
    """Seconds from nothing to its record if its ranks run, of a cell that runs out of memory until its first
    step; None where no step's time is known."""
    timed_steps: int | None

    @property
    def cell(self) -> Cell:
        return self.planned.cell

    @property
    def reason(self) -> str | None:
        """Why it cannot run; None where it can."""
        return self.planned.reason

    @property
    def room(self) -> Room | None:
        """Memory that a rank needs and may use; None where either is not known."""
        return self.planned.room

    @property
    def runs(self) -> bool:
        """Whether it starts ranks."""
        return self.reason is None and starts_ranks(self.cell)

    @property
    def ends_early(self) -> bool:
        """Whether it runs out of memory, in its first step at the latest."""
        return self.reason is None and self.room is not None and self.room.fit is Fit.OUT_OF_MEMORY

    @property
    def lasts(self) -> bool:
        """Whether it runs to its end."""
        return self.reason is None and not self.ends_early

    @property
    def is_too_long(self) -> bool:
        """Whether it would be ended before it is done."""
        return self.lasts and self.cell_s is not None and self.cell_s > self.cell.measure.timeout_s


class Forecast:
    """What is expected of the pending cells of a plan."""

    def __init__(self, plan: Plan, pending: Sequence[PlannedCell], estimate: Estimate) -> None:
        self.plan = plan
        self._estimate = estimate
        distinct = {each.cell.cell_id: each for each in pending}
        of_cell = {name: self._of(each) for name, each in distinct.items()}
        self.cells = tuple(replace(of_cell[each.cell.cell_id], planned=each) for each in pending)
        work = {work_of(each.cell) for each in distinct.values()}
        references = [reference for done, reference in plan.references.items() if done in work]
        self.references = tuple(each.cell for each in references if why_not_tried(each) is None)
        """Cells of `local` that run besides, for losses to be compared with."""
        self.not_tried = tuple(reason for each in references if (reason := why_not_tried(each)) is not None)
        """Of which lengths there is no such cell, and why."""
        left_open = [each.cell for each in distinct.values() if each.cell.measure.repeats == AUTO]
        self.repeats = self._repeats(left_open) if left_open else []
        """Repeats that the budget has room for, by what their first processes are expected to take."""

    def _of(self, planned: PlannedCell) -> CellForecast:
        cell, room = planned.cell, planned.room
        if planned.reason is not None:
            return CellForecast(planned, step=None, cell_s=None, timed_steps=None)
        step, cell_s = self._estimate.step(cell), self._estimate.measured_s(cell)
        timed = None if step is None else max(1, affordable_steps(cell.measure, step.seconds))
        if room is not None and room.fit is Fit.OUT_OF_MEMORY:
            cell_s = FIXED_S[cell.cluster.device]
        return CellForecast(planned, step, cell_s, timed)

    def _repeats(self, left_open: Sequence[Cell]) -> list[Repeats]:
        """Return the repeats of a sweep that begins; those of a resumed one depend on its records."""
        first = {each.cell.cell_id for each in self.plan.cells}
        if first != {each.cell.cell_id for each in self.cells if not each.planned.repeat}:
            return []
        ran = {
            each.cell.cell_id: [Process(each.cell_s, each.cell.tokens_per_step / each.step.seconds)]
            for each in self.cells
            if each.lasts and each.cell_s is not None and each.step is not None
        }
        return choose(left_open, ran, left_open[0].measure.repeats_budget_s - self.total_s)

    @property
    def illegal(self) -> list[CellForecast]:
        return [each for each in self.cells if each.reason is not None]

    @property
    def total_s(self) -> float:
        """Seconds of all pending cells whose time is known, without repeats that are left open.

        Where all cells are predicted, those that measuring them would take.
        """
        once = [each for each in self._timed if not (each.ends_early and each.planned.repeat)]
        known_s = sum(each.cell_s or 0.0 for each in once)  # cells that run out of memory are not repeated
        return START_S + known_s + sum(map(self.reference_s, self.references))

    @property
    def unknown(self) -> int:
        """Number of cells whose time is not in the total, for want of figures."""
        return sum(1 for each in self._timed if each.cell_s is None)

    @property
    def is_predicted(self) -> bool:
        """Whether nothing runs, so that its times are those of measuring instead."""
        return not any(each.runs for each in self.cells)

    @property
    def _timed(self) -> list[CellForecast]:
        return [each for each in self.cells if each.runs or (each.reason is None and self.is_predicted)]

    def reference_s(self, cell: Cell) -> float:
        """Seconds of a reference at the most: one that takes too long is ended."""
        took_s = self._estimate.measured_s(cell)
        return cell.measure.timeout_s if took_s is None else min(took_s, cell.measure.timeout_s)

    @property
    def without_interval(self) -> int:
        """Number of cells that ask for enough steps for an interval, and have no time for them.

        Where repeats are left open, processes are compared and not steps.
        """
        asking = (
            each
            for each in self.cells
            if each.lasts and each.cell.measure.steps >= INTERVAL_STEPS and each.cell.measure.repeats != AUTO
        )
        counts = {each.cell.cell_id: each.timed_steps for each in asking}
        return sum(1 for count in counts.values() if count is not None and count < INTERVAL_STEPS)

    @property
    def bases(self) -> list[str]:
        """What says how long steps take, most cells first."""
        return [basis for basis, _ in Counter(e.step.basis for e in self.cells if e.step).most_common()]

    @property
    def duration(self) -> str:
        """`about 31 min by the cost model, 17 min of it for one process of each cell`.

        Where some times are not known, it says of how many cells.
        """
        by = f" by {' and '.join(self.bases)}" if self.bases else ""
        if all(each.cell_s is None for each in self._timed):
            return f"an unknown time{by}"
        repeats = {each.planned.repeat for each in self.cells}
        counted = "one process" if len(repeats) == 1 else f"{len(repeats)} processes"
        repeats_s = sum(each.gets_s for each in self.repeats)
        told = f"about {duration_label(self.total_s + repeats_s)}{by}"
        told += f", {duration_label(self.total_s)} of it" if repeats_s else ""
        more = f" and what {self.unknown} more of the cells take" if self.unknown else ""
        return f"{told} for {counted} of each cell{more}"
