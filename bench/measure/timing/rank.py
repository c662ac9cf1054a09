"""The timed pass: warm up, agree on a number of steps, run them back to back after one barrier."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import torch.distributed as dist

from bench.measure.rank_pass import RankPass, StepRequest, Steps, TimedSteps
from bench.measure.timing.clock import StepClock, synchronise
from bench.measure.timing.section import FIRST_STEP, WARM_UP, RankTiming, affordable_steps, warm_up_steps
from bench.ranks.device import release_unused
from bench.ranks.log import RankStage

SETTLING_STEPS = 2
"""Full-length steps after the first of which the fastest says how many steps the budget has room for."""


class TimingPass(RankPass):
    def run(self) -> Steps:
        with self.measurement.log.during("timing"):
            yield from self.measurement.first_step()
            if self.measurement.measure.budget_s > 0 or self.measurement.measure.warmup_steps > 0:
                # A full-length step comes before the timed ones, with a budget the first one: what building,
                # checks and the short step left would count as its own.
                release_unused(self.measurement.subject.device)
            self.measurement.timed = yield from self.timed_steps()

    def part(self) -> RankTiming:
        timed = self.measurement.timed
        return RankTiming(
            step_times_ms=[timed.step_times_ms], window_ms=[timed.window_ms], warmup=timed.warmup
        )

    def timed_steps(self) -> Generator[StepRequest, Any, TimedSteps]:
        """Time steps within `measure.steps` and `measure.budget_s`, at least `measure.min_timed_steps`.

        A short step has paid for lazy initialisation by now. Where the budget leaves no room for full-length
        warm-up steps and no least number is asked for, the first full-length step is the timed one and the
        warm-up is called short. The listener is told of what comes before it begins, and of nothing while
        a window lasts.
        """
        measure, tell = self.measurement.measure, self.measurement.log.tell
        outcomes: list[Any] = []
        rounds, more, step_s = measure.steps, measure.warmup_steps, None
        if measure.budget_s > 0:
            tell(RankStage("timing", FIRST_STEP, 1))
            single = [(yield from self._window(1, outcomes, "short"))]
            if measure.warmup_s > 0:
                yield from self._settling_steps(outcomes, single)
            done_s = [each.window_ms / 1e3 for each in single]
            step_s = min(done_s)
            rounds = self.agreed(affordable_steps(measure, step_s))
            if rounds == 0:
                return single[-1]
            more = self.agreed(warm_up_steps(measure, step_s, done_s))
        if more > 0:
            tell(RankStage("timing", WARM_UP, more, step_s))
        for _ in range(more):
            yield StepRequest.BETWEEN
            outcomes.append((yield StepRequest.STEP))
        tell(RankStage("timing", None, rounds, step_s))
        return (yield from self._window(rounds, outcomes, "full"))

    def _settling_steps(self, outcomes: list[Any], single: list[TimedSteps]) -> Steps:
        """Run more steps before the number of timed steps is decided, where the warm-up has time for them.

        On a GPU the first full-length step allocates and compiles. The second one of ZeRO-3 is 1.6 to 9 times
        as long as the third, because DeepSpeed then walks its order of modules (results/reference/h100).
        """
        for _ in range(SETTLING_STEPS):
            done_s = [each.window_ms / 1e3 for each in single]
            if self.agreed(warm_up_steps(self.measurement.measure, min(done_s), done_s)) == 0:
                return
            self.measurement.log.tell(RankStage("timing", WARM_UP, 1, min(done_s)))
            single.append((yield from self._window(1, outcomes, "full")))

    def _window(
        self, steps: int, outcomes: list[Any], warmup: str
    ) -> Generator[StepRequest, Any, TimedSteps]:
        """So many steps under the clock; between two of them nothing of ours runs but its marks."""
        device, clocks = self.measurement.subject.device, []
        yield StepRequest.BETWEEN
        with self.measurement.window():
            self.measurement.meet()
            dist.barrier()
            synchronise(device)
            start = time.perf_counter()
            for step in range(steps):
                if step > 0:
                    yield StepRequest.BETWEEN
                clock = StepClock(device)
                clock.mark()
                outcomes.append((yield StepRequest.STEP))
                clock.mark()
                clocks.append(clock)
            synchronise(device)
            window_ms = (time.perf_counter() - start) * 1e3
        step_times_ms = [clock.step_times_ms()[0] for clock in clocks]
        return TimedSteps(step_times_ms, window_ms, warmup, outcomes)


PASS = TimingPass
