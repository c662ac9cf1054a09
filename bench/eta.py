"""How long the cells that are left may take, from those that are done."""

from __future__ import annotations

from collections.abc import Iterable

from bench.config import RunConfig
from bench.cost.flops import hardware_flops
from bench.record import Record

FIXED_S = 2.0


class Estimate:
    """Learns FLOP/s from finished cells; knows nothing before the first."""

    def __init__(self) -> None:
        self._flops_per_s: dict[str, float] = {}

    def learn(self, cell: RunConfig, record: Record) -> None:
        """Take the slowest rank's last timed step as the rate of this strategy."""
        if record.timing is not None:
            step_s = max(rank[-1] for rank in record.timing.step_times_ms) / 1e3
            self._flops_per_s[cell.strategy] = hardware_flops(cell, causal=True) / step_s

    def remaining_s(self, cells: Iterable[RunConfig]) -> float | None:
        """Seconds for these cells, or None before anything is known."""
        if not self._flops_per_s:
            return None
        return sum(map(self._cell_s, cells))

    def _cell_s(self, cell: RunConfig) -> float:
        slowest = min(self._flops_per_s.values())
        rate = self._flops_per_s.get(cell.strategy, slowest)
        step_s = hardware_flops(cell, causal=True) / rate
        timed_s = min(cell.measure.steps * step_s, max(cell.measure.budget_s, step_s))
        affords_warmup = cell.measure.budget_s > (cell.measure.warmup_steps + 1) * step_s
        other_steps = (cell.measure.warmup_steps if affords_warmup else 0) + cell.measure.trace
        return FIXED_S + timed_s + other_steps * step_s
