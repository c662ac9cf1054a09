"""Estimates of how long cells take, by the cost model and by measured steps; progress of the running cell."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from bench.config import Cell
from bench.cost.flops import hardware_flops
from bench.measure import planned_stages
from bench.measure.quality.section import scoring_steps
from bench.plan.planned import PlannedCell
from bench.ranks.log import RankStage
from bench.request.modes import starts_ranks

FIXED_S: Mapping[str, float] = {"cpu": 2.0, "cuda": 25.0}
"""Seconds that a cell takes in addition to its full-length steps, by device.

Measured on four CPU ranks with a warm fork server; for GPUs estimated for a model of 4 billion weights: CUDA
contexts, NCCL, weights, checks and reading of traces.
"""
REPLAYED_FIXED_S: Mapping[str, float] = {"cpu": 1.0, "cuda": 15.0}
"""FIXED_S of a replayed cell, which has no communicators, checks of values or traces.

Measured on a CPU; for GPUs estimated for loading a model of 4 billion weights.
"""
START_S = 6.0
"""Additional seconds of the first cell of a sweep, for importing packages (results/reference/cpu)."""
LATE_S = 5.0
"""Seconds by which a cell may exceed its estimate before it counts as late."""
IMPORTING_PACKAGES = "packages are imported"
"""Stage that the progress line shows for the first cell of a sweep until its ranks report."""


@dataclass(frozen=True, slots=True)
class ExpectedStep:
    """Estimated seconds of one full-length step."""

    seconds: float
    basis: str
    """Source of the estimate, in words."""
    caveat: str | None = None
    """Warning about the source; None without a warning."""


class Estimate:
    """Estimate of step times of legal cells, from expected times and the steps measured so far.

    For each measured step it stores the ratio of the measured to the expected seconds, or to the FLOPs of the
    step if no time is expected. The ratio depends on the size of a step, so there is one for each doubling of
    its FLOPs.

    Args:
        expected: Function that returns the expected step of a cell, for example by the cost model, or None.
    """

    def __init__(self, expected: Callable[[Cell], ExpectedStep | None] = lambda _: None) -> None:
        self._expected = cache(expected)
        self._ratios: dict[tuple[bool, str], dict[int, float]] = {}

    def learn(self, cell: Cell, step_s: float) -> None:
        """Store the ratio of the measured seconds of a full-length step for the cell's strategy and size."""
        kind = (self._expected(cell) is not None, cell.strategy)
        self._ratios.setdefault(kind, {})[_doublings(cell)] = step_s / self._work(cell)

    def step_s(self, cell: Cell) -> float | None:
        """Return the seconds of one step; None without any estimate."""
        expected = self.step(cell)
        return None if expected is None else expected.seconds

    def step(self, cell: Cell) -> ExpectedStep | None:
        """Return the seconds of one step with their source; None without any estimate.

        The ratio is that of the strategy's measured step of the nearest size. Without one it is the largest
        ratio among the other strategies. Before any measured step, the result is the expected step.
        """
        expected = self._expected(cell)
        kind = (expected is not None, cell.strategy)
        other_strategies = [ratios for other, ratios in self._ratios.items() if other[0] == kind[0]]
        relevant = [self._ratios[kind]] if kind in self._ratios else other_strategies
        doublings = _doublings(cell)
        ratios = [by_size[min(by_size, key=lambda size: abs(size - doublings))] for by_size in relevant]
        return ExpectedStep(max(ratios) * self._work(cell), "steps of this sweep") if ratios else expected

    def remaining_s(self, cells: Iterable[PlannedCell]) -> float | None:
        """Return the total seconds of cells from start to record; None if one cell's time is unknown."""
        cells_s = [self.cell_s(cell) for cell in cells]
        return None if None in cells_s else sum(cell_s for cell_s in cells_s if cell_s is not None)

    def cell_s(self, planned: PlannedCell) -> float | None:
        """Return the seconds of a planned cell; 0 if it starts no ranks, None if its time is unknown."""
        if not starts_ranks(planned.cell) or planned.reason is not None:
            return 0.0
        return self.measured_s(planned.cell)

    def measured_s(self, cell: Cell) -> float | None:
        """Return the seconds of a cell if its ranks run, from start to record; None if they are unknown."""
        step_s = self.step_s(cell)
        return None if step_s is None else _cell_seconds(cell, step_s)

    def _work(self, cell: Cell) -> float:
        expected = self._expected(cell)
        return hardware_flops(cell, causal=True) if expected is None else expected.seconds


def _doublings(cell: Cell) -> int:
    """Return the number of binary digits of a step's FLOPs, which grows by one with each doubling."""
    return hardware_flops(cell, causal=True).bit_length()


def _cell_seconds(cell: Cell, step_s: float) -> float:
    """Return the seconds of a cell whose full-length steps take `step_s` seconds."""
    steps = sum(stage.steps for stage in planned_stages(cell.measure, step_s)) + scoring_steps(cell)
    fixed_s = FIXED_S if cell.replay.rank is None else REPLAYED_FIXED_S
    return fixed_s[cell.cluster.device] + step_s * steps


class CellProgress:
    """Progress and remaining time of the running cell, by the last stage that its first rank reported.

    Args:
        step_s: Estimated seconds of a step, until the cell has timed one; None without an estimate.
        now_s: Clock in seconds.
        imports: Whether the cell is the first of the sweep, whose ranks wait until packages are imported.
    """

    def __init__(
        self, cell: Cell, step_s: float | None, now_s: Callable[[], float], *, imports: bool = False
    ) -> None:
        self._cell = cell
        self._step_s = step_s
        self._now_s = now_s
        self._imports_s = START_S if imports else 0.0
        self._begun_s = self._entered_s = now_s()
        self._stage = RankStage("starting", IMPORTING_PACKAGES if imports else None)

    def enter(self, stage: RankStage) -> None:
        """Record the stage that has just begun."""
        self._stage, self._entered_s = stage, self._now_s()
        self._step_s = stage.step_s or self._step_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the cell was started."""
        return self._now_s() - self._begun_s

    def stage_label(self) -> str:
        """Return the running stage: `parity, objective`, `timing, first step`, `timing, step about 3/20`.

        The number of the step follows from the seconds since the stage began.
        """
        stage = self._stage
        if stage.steps < 2 or self._step_s is None:  # noqa: PLR2004  a single step is not counted
            return f"{stage.pass_name}, {stage.part}" if stage.part else stage.pass_name
        running = min(stage.steps, 1 + int((self._now_s() - self._entered_s) / self._step_s))
        return f"{stage.pass_name}, {stage.part or 'step'} about {running}/{stage.steps}"

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until the cell ends, negative if it is late; None if a step's time is unknown."""
        if self._step_s is None:
            return None
        return self._imports_s + _cell_seconds(self._cell, self._step_s) - self.elapsed_s
