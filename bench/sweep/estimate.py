"""How long cells may take, from what steps took so far, and where the running one is."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from bench.cell.run import RUNS
from bench.config import RunConfig
from bench.cost.flops import hardware_flops
from bench.passes import planned_stages
from bench.ranks.log import Stage

FIXED_S = 2.0
"""Of a cell: all but its full-length steps. Seen on four CPU ranks with a warm fork server."""


class Estimate:
    """Learns FLOP/s from the steps it is told of; knows nothing before the first.

    Long steps run at other rates than short ones, so rates are kept by doublings of a step's FLOPs.
    """

    def __init__(self) -> None:
        self._flops_per_s: dict[str, dict[int, float]] = {}

    def learn(self, cell: RunConfig, step_s: float) -> None:
        """Take what a full-length step took as the rate of its strategy."""
        flops = hardware_flops(cell, causal=True)
        self._flops_per_s.setdefault(cell.strategy, {})[flops.bit_length()] = flops / step_s

    def step_s(self, cell: RunConfig) -> float | None:
        """Seconds of one step by the nearest that is known; if need be by the slowest of other strategies."""
        flops = hardware_flops(cell, causal=True)
        own = self._flops_per_s.get(cell.strategy)
        known = [own] if own is not None else [*self._flops_per_s.values()]
        rates = [rates[min(rates, key=lambda size: abs(size - flops.bit_length()))] for rates in known]
        return flops / min(rates) if rates else None

    def remaining_s(self, cells: Iterable[RunConfig]) -> float | None:
        """Seconds for these cells, from nothing to their records; None before anything is known."""
        if not self._flops_per_s:
            return None
        return sum(map(self._cell_s, cells))

    def _cell_s(self, cell: RunConfig) -> float:
        """Arithmetic takes no time to speak of."""
        if cell.mode not in RUNS:
            return 0.0
        step_s = self.step_s(cell)
        assert step_s is not None
        return FIXED_S + step_s * sum(each.steps for each in planned_stages(cell.measure, step_s))


class CellProgress:
    """Where the running cell is by now and how long it may still take, by what its first rank told last.

    `step_s` is the guess before the cell has timed a step itself, None without one; `now_s` is a clock.
    """

    def __init__(self, cell: RunConfig, step_s: float | None, now_s: Callable[[], float]) -> None:
        self._cell = cell
        self._step_s = step_s
        self._now_s = now_s
        self._begun_s = self._entered_s = now_s()
        self._stage = Stage("starting")
        self._last_with_steps: Stage | None = None

    def enter(self, stage: Stage) -> None:
        """Take note of what has just begun."""
        self._stage, self._entered_s = stage, self._now_s()
        self._step_s = stage.step_s or self._step_s
        if stage.steps:
            self._last_with_steps = stage

    @property
    def elapsed_s(self) -> float:
        """Seconds since the cell was started."""
        return self._now_s() - self._begun_s

    def where(self) -> str:
        """`parity, objective`, `timing, first step` or, counted by the clock, `timing, step about 3/20`."""
        stage = self._stage
        if stage.steps < 2 or self._step_s is None:  # noqa: PLR2004  one step needs no count
            return f"{stage.pass_name}, {stage.part}" if stage.part else stage.pass_name
        running = min(stage.steps, 1 + int(self._in_stage_s / self._step_s))
        return f"{stage.pass_name}, {stage.part or 'step'} about {running}/{stage.steps}"

    def remaining_s(self) -> float | None:
        """Seconds to the cell's end; None before anything is known of its steps."""
        if self._step_s is None:
            return None
        steps = sum(stage.steps for stage in self._ahead(self._step_s))
        own_s = self._stage.steps * self._step_s - self._in_stage_s if self._stage.steps else 0.0
        fixed_s = FIXED_S - self.elapsed_s if self._last_with_steps is None else 0.0
        return max(0.0, own_s) + max(0.0, fixed_s) + steps * self._step_s

    @property
    def _in_stage_s(self) -> float:
        return self._now_s() - self._entered_s

    def _ahead(self, step_s: float) -> list[Stage]:
        """The stages with steps that have not begun."""
        planned = planned_stages(self._cell.measure, step_s)
        if self._last_with_steps is None:
            return planned
        names = [_name(stage) for stage in planned]
        begun = _name(self._last_with_steps)
        return planned[names.index(begun) + 1 :] if begun in names else []


def _name(stage: Stage) -> tuple[str, str | None]:
    return stage.pass_name, stage.part
