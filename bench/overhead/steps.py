"""What a step costs under the harness and under each of its instruments, against a bare loop.

All kinds of step run in turns in one set of processes, on the same model, optimizer and data, so that
what a machine's neighbours do falls on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.attention.watch import AttentionWatch
from bench.cell.worker import RankJob, join
from bench.passes.memory.peaks import MemoryWatch, PeakTracker
from bench.passes.tap import CommunicationTap
from bench.passes.timing.clock import StepClock
from bench.passes.trace.trace import StepTracer
from bench.ranks.groups import make_groups
from bench.ranks.log import RankLog
from bench.strategies import STRATEGIES, runnable
from bench.strategies.strategy import IGNORED_LABEL
from bench.training.engines import DDP
from bench.workloads import Rank
from bench.workloads.train import Train

WARM_UP_ROUNDS = 3
TimeMs = Callable[[int], float]
"""Runs the step of this number; milliseconds it took this rank."""


@dataclass(frozen=True, slots=True)
class Instruments:
    """The kinds of step that are compared with a bare one."""

    workload: Train
    folder: Path

    def table(self) -> Mapping[str, TimeMs]:
        return {
            "bare": self.bare,
            "harness": self.harness,
            "tap": self.tap,
            "memory": self.memory,
            "trace": self.trace,
        }

    def bare(self, number: int) -> float:
        """What a user writes by hand, with nothing of ours but model, strategy and data."""
        rank, cell, engine = self.workload.rank, self.workload.cell, self.workload.optimizer
        assert isinstance(engine, DDP)
        groups, parameters = rank.strategy.groups, [*engine.model.parameters()]
        start = time.perf_counter()
        whole = self.workload.trainer.data.micro_batch(number, 0, groups.data_rank, cell.seq_len)
        batch = rank.strategy.shard(whole)
        valid = (batch.labels != IGNORED_LABEL).sum()
        dist.all_reduce(valid)
        with engine.autocast:
            loss_sum = engine.module(batch.input_ids, batch.labels, batch.position_ids)
            (loss_sum * (groups.world_size / valid)).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        return (time.perf_counter() - start) * 1e3

    def harness(self, number: int) -> float:
        """A step of the timed pass, its marks of the clock included."""
        start = time.perf_counter()
        clock = StepClock(self.workload.rank.device)
        clock.mark()
        self.workload.step(number)
        clock.mark()
        return (time.perf_counter() - start) * 1e3

    def tap(self, number: int) -> float:
        """A step with every collective written down."""
        watch = AttentionWatch()
        tap = CommunicationTap(watch)
        start = time.perf_counter()
        with self.workload.watched(watch), tap:
            self.workload.step(number)
        return (time.perf_counter() - start) * 1e3

    def memory(self, number: int) -> float:
        """A step with every tensor's memory counted."""
        tracker = self._tracker()
        start = time.perf_counter()
        with tracker:
            self.workload.step(number)
        return (time.perf_counter() - start) * 1e3

    def trace(self, number: int) -> float:
        """A step under the profiler, without writing and reading its trace."""
        watch, workload = AttentionWatch(), self.workload
        watching = partial(workload.watched, watch)
        tracer = StepTracer(watch, workload.optimizer_spans, watching, workload.device, self.folder)
        with tracer.step():
            self.workload.step(number)
        (traced,) = tracer.traced
        traced.path.unlink()
        start_ns, end_ns = traced.regions.step_ns
        return (end_ns - start_ns) / 1e6

    def _tracker(self) -> PeakTracker:
        return MemoryWatch(self.workload.rank.device, self.workload.rank.phase).steady


def in_turns(job: RankJob, log: RankLog) -> dict[str, Any]:
    """A rank's whole life: every kind of step, `measure.steps` times each, in alternating order."""
    with log.during("compare"):
        device, cell = join(job), job.cell
        strategy = runnable(cell.strategy)(cell, make_groups(cell), STRATEGIES[cell.strategy])
        with strategy.install() as wiring:
            kinds = Instruments(Train(Rank(strategy, wiring, device, log.step)), job.folder).table()
            times_ms: dict[str, list[float]] = {name: [] for name in kinds}
            names = [*kinds]
            for number in range(WARM_UP_ROUNDS + cell.measure.steps):
                for name in names if number % 2 else reversed(names):
                    dist.barrier()
                    times_ms[name].append(kinds[name](number))
    return {"times_ms": {name: times[WARM_UP_ROUNDS:] for name, times in times_ms.items()}}
