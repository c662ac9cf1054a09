"""How long cells may take, from what steps took so far, and where the running one is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from bench.config import Cell
from bench.cost.flops import hardware_flops
from bench.measure import planned_stages
from bench.plan.planned import PlannedCell
from bench.ranks.log import RankStage
from bench.request.modes import starts_ranks

FIXED_S: Mapping[str, float] = {"cpu": 2.0, "cuda": 25.0}
"""Of a cell: all but its full-length steps, by device. Seen on four CPU ranks with a warm fork server; of
GPUs reckoned for a model of 4 billion weights: CUDA contexts, NCCL, weights, checks, traces that are read."""
REPLAYED_FIXED_S: Mapping[str, float] = {"cpu": 1.0, "cuda": 15.0}
"""Of a replayed cell, which has no communicators, no checks of values and no traces. Seen on a CPU; of GPUs
reckoned for loading a model of 4 billion weights."""
START_S = 6.0
"""Of a sweep's first cell beyond that: packages are imported (results/reference/cpu)."""
LATE_S = 5.0
"""A cell that takes longer than thought by less than this is on time: a guess is no better."""
IMPORTING = "packages are imported"


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of one step."""

    seconds: float
    basis: str
    """Source of the estimate, in words."""
    caveat: str | None = None
    """Warning about the source; None without one."""


class Estimate:
    """Learns from the steps of legal cells; before the first it knows what was expected of them.

    A step is compared with what was expected of it, or with its FLOPs where nothing was. Long steps run
    at other rates than short ones, so the ratios are kept by doublings of a step's FLOPs.
    """

    def __init__(self, expected: Callable[[Cell], Expected | None] = lambda _: None) -> None:
        self._expected = cache(expected)
        self._ratios: dict[tuple[bool, str], dict[int, float]] = {}

    def learn(self, cell: Cell, step_s: float) -> None:
        """Take what a full-length step took as the rate of its strategy."""
        kind = (self._expected(cell) is not None, cell.strategy)
        self._ratios.setdefault(kind, {})[_doublings(cell)] = step_s / self._work(cell)

    def step_s(self, cell: Cell) -> float | None:
        """Seconds of one step by the nearest that is known; if need be by the slowest of other strategies."""
        expected = self.step(cell)
        return None if expected is None else expected.seconds

    def step(self, cell: Cell) -> Expected | None:
        """Seconds of one step and where they come from; before any step is known, what was expected."""
        expected = self._expected(cell)
        kind = (expected is not None, cell.strategy)
        alike = [ratios for known, ratios in self._ratios.items() if known[0] == kind[0]]
        known = [self._ratios[kind]] if kind in self._ratios else alike
        doublings = _doublings(cell)
        ratios = [ratios[min(ratios, key=lambda size: abs(size - doublings))] for ratios in known]
        return Expected(max(ratios) * self._work(cell), "steps of this sweep") if ratios else expected

    def remaining_s(self, cells: Iterable[PlannedCell]) -> float | None:
        """Seconds for these cells, from nothing to their records; None where one of them is not known."""
        each_s = [self.cell_s(cell) for cell in cells]
        return None if None in each_s else sum(each for each in each_s if each is not None)

    def cell_s(self, planned: PlannedCell) -> float | None:
        """Seconds of one; arithmetic takes no time to speak of, and neither does a refusal."""
        if not starts_ranks(planned.cell) or planned.reason is not None:
            return 0.0
        return self.measured_s(planned.cell)

    def measured_s(self, cell: Cell) -> float | None:
        """Seconds if its ranks ran: start, checks, warm-up, timed and traced steps."""
        step_s = self.step_s(cell)
        return None if step_s is None else _whole_s(cell, step_s)

    def _work(self, cell: Cell) -> float:
        expected = self._expected(cell)
        return hardware_flops(cell, causal=True) if expected is None else expected.seconds


def _doublings(cell: Cell) -> int:
    return hardware_flops(cell, causal=True).bit_length()


def _whole_s(cell: Cell, step_s: float) -> float:
    """Seconds of a cell whose steps take so long."""
    steps = sum(each.steps for each in planned_stages(cell.measure, step_s))
    fixed_s = FIXED_S if cell.replay.rank is None else REPLAYED_FIXED_S
    return fixed_s[cell.cluster.device] + step_s * steps


class CellProgress:
    """Where the running cell is by now and how long it may still take, by what its first rank told last.

    `step_s` is the guess before the cell has timed a step itself, None without one; `now_s` is a clock.
    """

    def __init__(
        self, cell: Cell, step_s: float | None, now_s: Callable[[], float], *, imports: bool = False
    ) -> None:
        """`imports` for the sweep's first ranks, which wait until packages are imported."""
        self._cell = cell
        self._step_s = step_s
        self._now_s = now_s
        self._imports_s = START_S if imports else 0.0
        self._begun_s = self._entered_s = now_s()
        self._stage = RankStage("starting", IMPORTING if imports else None)

    def enter(self, stage: RankStage) -> None:
        """Take note of what has just begun."""
        self._stage, self._entered_s = stage, self._now_s()
        self._step_s = stage.step_s or self._step_s

    @property
    def elapsed_s(self) -> float:
        """Seconds since the cell was started."""
        return self._now_s() - self._begun_s

    def where(self) -> str:
        """`parity, objective`, `timing, first step` or, counted by the clock, `timing, step about 3/20`."""
        stage = self._stage
        if stage.steps < 2 or self._step_s is None:  # noqa: PLR2004  one step needs no count
            return f"{stage.pass_name}, {stage.part}" if stage.part else stage.pass_name
        running = min(stage.steps, 1 + int((self._now_s() - self._entered_s) / self._step_s))
        return f"{stage.pass_name}, {stage.part or 'step'} about {running}/{stage.steps}"

    @property
    def left_s(self) -> float | None:
        """Seconds to the cell's end, negative where it is late; None as long as no step is known."""
        if self._step_s is None:
            return None
        return self._imports_s + _whole_s(self._cell, self._step_s) - self.elapsed_s
