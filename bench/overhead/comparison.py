"""Every kind of step against the bare one, as the ranks timed them: what is printed, and what is missed."""

from __future__ import annotations

import math
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cell.launcher import Launcher
from bench.cell.watch import Silent
from bench.config import RunConfig
from bench.overhead.goal import Estimate, Goal, Verdict, estimated, minutes_needed
from bench.statistics import median_interval

if TYPE_CHECKING:
    from bench.node.worker import RankEntry
    from bench.ranks.log import Stage

INSTRUMENTS = {
    "tap": "with every collective written down",
    "memory": "with every tensor counted",
    "trace": "under the profiler",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """What the ranks found; times are those of the slowest rank."""

    log_ratios: list[float]
    """Of a timed step over a bare one, by round."""
    bare_ms: list[float]
    """By round."""
    paired_s: float
    """Seconds these rounds took."""
    times_ms: Mapping[str, list[float]]
    """Of a step of each kind, in rounds before those."""
    collectives: Mapping[str, int]
    """Calls in a bare step and in a timed one."""

    @property
    def estimate(self) -> Estimate:
        return estimated(self.log_ratios)

    def lines(self, cell: RunConfig) -> list[str]:
        calls = self.collectives
        return [
            f"a step, {cell.strategy} ddp, {cell.seq_len} tokens, 2 CPU ranks, against a bare loop's",
            f"  bare loop                           {statistics.median(self.bare_ms):.1f} ms",
            f"  a timed step                        {self.estimate} in {self.paired_s:.0f} s",
            *self._instruments(),
            f"  collective calls                    {calls['harness']}, in a bare step {calls['bare']}",
        ]

    def missed(self, goal: Goal) -> list[str]:
        """What is surely missed."""
        missed, calls = [], self.collectives
        if calls["harness"] != calls["bare"]:
            missed.append(
                f"a timed step should make {calls['bare']} collective calls, not {calls['harness']}"
            )
        if goal.verdict(self.estimate) is Verdict.MISSED:
            missed.append(f"a timed step takes {self.estimate}; the goal is that {goal}")
        return missed

    def undecided(self, goal: Goal, minutes: float) -> list[str]:
        """What would decide the goal, for which the whole command's minutes were too few; or nothing."""
        if goal.verdict(self.estimate) is not Verdict.UNDECIDED:
            return []
        paired = self.paired_s / 60
        enough = minutes + minutes_needed(goal, self.estimate, paired) - paired
        half_width = self.estimate.interval.half_width
        found = (
            f"{paired:.1f} minutes of {self.estimate.rounds} rounds gave an interval of +-{half_width:.3f}"
        )
        way_out = f"--minutes {math.ceil(enough)} should do at this noise, fewer where nothing else runs"
        return [f"undecided: {found}; the goal is that {goal}; {way_out}"]

    def _instruments(self) -> list[str]:
        """A line for each; none where no rounds of them ran."""
        lines = []
        for name, said in INSTRUMENTS.items() if self.times_ms["bare"] else ():
            pairs = zip(self.times_ms[name], self.times_ms["bare"], strict=True)
            ratios = [mine / bare for mine, bare in pairs]
            interval = median_interval(ratios)
            within = f" ({interval.low:.3f} to {interval.high:.3f})" if interval else ""
            lines.append(f"  {said:35} {statistics.median(ratios):.3f}{within}, n={len(ratios)} steps")
        return lines


class Printed(Silent):
    """A listener that prints what the ranks say of their progress."""

    def tell(self, stage: Stage) -> None:
        if stage.part is not None:
            print(f"  so far {stage.part}", flush=True)


def step_costs(
    cell: RunConfig,
    launcher: Launcher,
    goal: Goal,
    deadline_s: float,
    instrument_rounds: int,
    entry: RankEntry | None = None,
) -> StepCosts:
    """Run the ranks until the goal is decided or the deadline is over."""
    from bench.overhead.turns import Request, compare

    with tempfile.TemporaryDirectory() as folder:
        Request(goal, deadline_s, instrument_rounds).write(Path(folder))
        ends = launcher.run(cell, Path(folder), entry=entry or compare, listener=Printed())
    reports = [end.report for end in ends if end.report is not None]
    if len(reports) < len(ends):
        failed = next(end for end in ends if end.report is None)
        sys.exit(f"the steps did not run: {failed.why}")
    return StepCosts(**{name: reports[0][name] for name in StepCosts.__dataclass_fields__})
