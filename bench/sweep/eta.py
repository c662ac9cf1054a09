"""How long cells may take, from what steps took so far."""

from __future__ import annotations

from collections.abc import Iterable

from bench.config import RunConfig
from bench.cost.flops import hardware_flops
from bench.passes import planned_stages

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
        step_s = self.step_s(cell)
        assert step_s is not None
        return FIXED_S + step_s * sum(each.steps for each in planned_stages(cell.measure, step_s))
