"""Timing pass on a rank: warm up, agree on a number of steps, time them back to back after one barrier."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import nullcontext
from typing import Any

import torch.distributed as dist

from bench.measure.facts import one_rank_list
from bench.measure.rank_pass import RankPass, StepRequest, StepRequests, TimedSteps
from bench.measure.timing.clock import StepClock, synchronise
from bench.measure.timing.device_speed import product_flops_per_s
from bench.measure.timing.section import FIRST_STEP, WARM_UP, RankTiming, affordable_steps, warm_up_steps
from bench.ranks.device import release_unused
from bench.ranks.log import RankStage

CHECKED_STEPS = 4
"""Number of full-length steps whose gradients are compared with those of another cell.

Rounding errors grow with the training: on random weights first moments of sound cells (bf16, 512 tokens,
learning rate 1e-3) differed by up to 0.13 of their length after 22 steps, and by 4.3 after 32."""
SETTLING_STEPS = 2
"""Largest number of full-length steps between the first one and the decision how many steps are timed.

The fastest of the first and of these steps decides how many timed steps fit the budget."""


class TimingPass(RankPass):
    product_flops_per_s: float | None = None

    def run(self) -> StepRequests:
        with self.measurement.log.run_phase("timing"):
            yield from self.measurement.first_step()
            if self.measurement.measure.budget_s > 0 or self.measurement.measure.warmup_steps > 0:
                # The allocator still holds memory that building, checks and the short step have freed. It
                # would count as reserved in the next, full-length step, which may be the timed one.
                release_unused(self.measurement.subject.device)
            self.measurement.timed = yield from self.timed_steps()
            if len(self.measurement.outcomes) < CHECKED_STEPS:
                self.measurement.after_checked_steps()
        strategy = self.measurement.subject.strategy
        if strategy is not None:
            with self.measurement.log.run_phase("device speed"):
                self.product_flops_per_s = product_flops_per_s(
                    strategy.cell.dtype, self.measurement.subject.device
                )

    def part(self) -> RankTiming:
        timed = self.measurement.timed
        return RankTiming(
            step_times_ms=[timed.step_times_ms],
            window_ms=[timed.window_ms],
            warmup=timed.warmup,
            product_flops_per_s=one_rank_list(self.product_flops_per_s),
        )

    def timed_steps(self) -> Generator[StepRequest, Any, TimedSteps]:
        """Warm up, then time at most `measure.steps` steps, and return the times of the timed steps.

        With a budget the timed steps must fit `measure.budget_s`, but at least `measure.min_timed_steps` run.
        The short first step has done all lazy initialisation. If the budget leaves no time for full-length
        warm-up steps and `measure.min_timed_steps` is 0, the first full-length step is therefore the timed
        step, and `warmup` is "short". The launcher gets a report before each stage and none within a window.
        """
        measure, report = self.measurement.measure, self.measurement.log.report
        outcomes = self.measurement.outcomes
        n_timed, n_warmup, step_s = measure.steps, measure.warmup_steps, None
        if measure.budget_s > 0:
            report(RankStage("timing", FIRST_STEP, 1))
            single_steps = [(yield from self._timed_window(1, "short"))]
            if measure.warmup_s > 0:
                yield from self._settling_steps(single_steps)
            done_s = [step.window_ms / 1e3 for step in single_steps]
            step_s = min(done_s)
            n_timed = self.broadcast_count(affordable_steps(measure, step_s))
            if n_timed == 0:
                return single_steps[-1]
            n_warmup = self.broadcast_count(warm_up_steps(measure, step_s, done_s))
        if n_warmup > 0:
            report(RankStage("timing", WARM_UP, n_warmup, step_s))
        for _ in range(n_warmup):
            yield StepRequest.BEFORE_NEXT_STEP
            outcomes.append((yield StepRequest.STEP))
            self._pause_after_checked_steps()
        report(RankStage("timing", None, n_timed, step_s))
        return (yield from self._timed_window(n_timed, "full"))

    def _settling_steps(self, single_steps: list[TimedSteps]) -> StepRequests:
        """Add at most SETTLING_STEPS steps to `single_steps`, until `measure.warmup_s` seconds have passed.

        On a GPU the first full-length step allocates and compiles. With ZeRO-3 the second step takes 1.6 to 9
        times as long as the third, because DeepSpeed then walks its order of modules
        (results/reference/h100).
        """
        for _ in range(SETTLING_STEPS):
            done_s = [step.window_ms / 1e3 for step in single_steps]
            if self.broadcast_count(warm_up_steps(self.measurement.measure, min(done_s), done_s)) == 0:
                return
            self.measurement.log.report(RankStage("timing", WARM_UP, 1, min(done_s)))
            single_steps.append((yield from self._timed_window(1, "full")))

    def _pause_after_checked_steps(self) -> float:
        """Let the passes examine what the first CHECKED_STEPS full-length steps did; return the seconds."""
        if len(self.measurement.outcomes) != CHECKED_STEPS or self.measurement.subject.trainer is None:
            return 0.0
        synchronise(self.measurement.subject.device)
        start = time.perf_counter()
        self.measurement.after_checked_steps()
        dist.barrier()
        return time.perf_counter() - start

    def _timed_window(self, steps: int, warmup: str) -> Generator[StepRequest, Any, TimedSteps]:
        """Time steps with nothing but clock marks between them, and one pause that does not count."""
        device, outcomes = self.measurement.subject.device, self.measurement.outcomes
        clocks, started_ns = list[StepClock](), list[int]()
        is_first = steps == 1 and not outcomes
        yield StepRequest.BEFORE_NEXT_STEP
        with (
            self.measurement.around_first_full_step() if is_first else nullcontext(),
            self.measurement.around_window(),
        ):
            self.measurement.raise_if_rank_failed()
            dist.barrier()
            synchronise(device)
            start = time.perf_counter()
            for step in range(steps):
                if step > 0:
                    yield StepRequest.BEFORE_NEXT_STEP
                clock = StepClock(device)
                started_ns.append(time.time_ns())
                clock.mark()
                outcomes.append((yield StepRequest.STEP))
                clock.mark()
                clocks.append(clock)
                start += self._pause_after_checked_steps()
            synchronise(device)
            window_ms = (time.perf_counter() - start) * 1e3
            started_ns.append(time.time_ns())
        step_times_ms = [clock.step_times_ms()[0] for clock in clocks]
        return TimedSteps(step_times_ms, window_ms, warmup, len(outcomes), started_ns)


PASS = TimingPass
