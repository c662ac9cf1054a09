"""A running cell as its launcher sees it: the last stage that was told, and the clock since."""

from __future__ import annotations

from collections.abc import Callable

from bench.config import RunConfig
from bench.passes import planned_stages
from bench.ranks.log import Stage
from bench.sweep.eta import FIXED_S


class CellProgress:
    """Where one cell is by now and how long it may still take.

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
