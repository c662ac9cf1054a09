"""A timed step against a bare one, as the ranks timed them: what is printed, and what is missed."""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.cell.launcher import Launcher
from bench.config import RunConfig
from bench.statistics import Interval, centre_interval

ROUNDS = 60
"""Of timed and bare steps; six or more give an interval."""
MARGIN = 0.02
"""How far from 1.00 a timed step may be, and how wide to each side an interval may be that says so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What the ranks found; times are those of the slowest rank."""

    log_ratios: list[float]
    """Of a timed step over a bare one, by round."""
    bare_ms: list[float]
    """By round."""
    collectives: Mapping[str, int]
    """Calls in a bare step and in a timed one."""

    @property
    def ratio(self) -> float:
        """A timed step over a bare one."""
        return math.exp(centre_interval(self.log_ratios)[0])

    @property
    def interval(self) -> Interval:
        """The ratio's.

        Rounds are symmetric about their centre: where the two kinds of step differ by a factor only,
        exchanging them turns a round's deviation into its negative, and every other round is exchanged.
        """
        interval = centre_interval(self.log_ratios)[1]
        assert interval is not None
        return Interval(low=math.exp(interval.low), high=math.exp(interval.high))

    def lines(self, cell: RunConfig) -> list[str]:
        calls = self.collectives
        return [
            f"a step, {cell.strategy} ddp, {cell.seq_len} tokens, 2 CPU ranks, against a bare loop's",
            f"  bare loop                           {statistics.median(self.bare_ms):.1f} ms",
            f"  a timed step                        {self._shown}",
            f"  collective calls                    {calls['harness']}, in a bare step {calls['bare']}",
        ]

    def missed(self) -> list[str]:
        """What is surely missed."""
        missed, calls, interval = [], self.collectives, self.interval
        if calls["harness"] != calls["bare"]:
            missed.append(
                f"a timed step should make {calls['bare']} collective calls, not {calls['harness']}"
            )
        if interval.low > 1 + MARGIN or interval.high < 1 - MARGIN:
            missed.append(f"a timed step takes {self._shown}; it should take 1.00 +-{MARGIN}")
        return missed

    @property
    def noise(self) -> str | None:
        """That the interval is too wide to tell whether the goal is met; None where it is not."""
        if self.interval.half_width <= MARGIN:
            return None
        return (
            f"too noisy here: the interval is +-{self.interval.half_width:.3f}, wider than +-{MARGIN};"
            " run it where nothing else runs"
        )

    @property
    def _shown(self) -> str:
        low, high = self.interval.low, self.interval.high
        return f"{self.ratio:.3f} ({low:.3f} to {high:.3f}), n={len(self.log_ratios)} rounds"


def step_costs(
    cell: RunConfig, launcher: Launcher, rounds: int, entry: Callable[..., dict[str, Any]] | None = None
) -> StepCosts:
    """Run the ranks for so many rounds, in `entry` or else `compare`."""
    from bench.overhead.turns import compare  # imports torch, which `--help` need not wait for

    with tempfile.TemporaryDirectory() as folder:
        ends = launcher.run(cell, Path(folder), entry=partial(entry or compare, rounds=rounds))
    reports = [end.report for end in ends if end.report is not None]
    if len(reports) < len(ends):
        failed = next(end for end in ends if end.report is None)
        sys.exit(f"the steps did not run: {failed.why}")
    return StepCosts(**{name: reports[0][name] for name in StepCosts.__dataclass_fields__})
