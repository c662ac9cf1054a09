"""The traced pass: full-length steps under the profiler, each read as soon as it is over."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.measure.rank_pass import RankPass, Steps
from bench.measure.trace.section import RankSteps, traced_steps
from bench.measure.trace.trace import StepTracer, keep_trace
from bench.measure.trace.waiting import ClockOffset, RankTrace

PINGS = 30
"""The one with the shortest round trip counts: median error of 3 to 10 us over gloo on one machine."""


class NodeClocks:
    """Compares the clock of each node's first rank with rank 0's, for all ranks of the node."""

    def __init__(self, nodes: int) -> None:
        """Every rank must call it; ranks of a node are neighbours, as many on each."""
        self._ranks_per_node = dist.get_world_size() // nodes
        self._firsts = range(0, dist.get_world_size(), self._ranks_per_node)
        is_gloo = dist.get_backend() == "gloo"
        group: Any = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo")
        self._group: dist.ProcessGroup = group

    def offset(self) -> ClockOffset:
        """This rank's, now; every rank must call it."""
        found_ns = torch.zeros(len(self._firsts), 2, dtype=torch.int64)
        for node, first in enumerate(self._firsts):
            if dist.get_rank() == 0 and first != 0:
                found_ns[node] = self._asked(first)
            elif dist.get_rank() == first != 0:
                self._answered()
        dist.broadcast(found_ns, 0, group=self._group)
        offset_ns, round_trip_ns = found_ns[dist.get_rank() // self._ranks_per_node].tolist()
        return ClockOffset(offset_ns / 1e3, round_trip_ns / 2e3)

    def _asked(self, other: int) -> torch.Tensor:
        """Nanoseconds: what its clock says at the middle of the fastest round trip less ours; that trip."""
        its_ns, trips = torch.zeros(1, dtype=torch.int64), []
        for _ in range(PINGS):
            sent_ns = time.monotonic_ns()
            dist.send(its_ns, other, group=self._group)
            dist.recv(its_ns, other, group=self._group)
            got_ns = time.monotonic_ns()
            trips.append((got_ns - sent_ns, int(its_ns) - (sent_ns + got_ns) // 2))
        round_trip_ns, offset_ns = min(trips)
        return torch.tensor([offset_ns, round_trip_ns])

    def _answered(self) -> None:
        mine_ns = torch.zeros(1, dtype=torch.int64)
        for _ in range(PINGS):
            dist.recv(mine_ns, 0, group=self._group)
            mine_ns.fill_(time.monotonic_ns())
            dist.send(mine_ns, 0, group=self._group)


def between(before: ClockOffset, after: ClockOffset) -> ClockOffset:
    """Halfway between two comparisons; how far the clocks drifted meanwhile counts as error."""
    drift_us = abs(after.us - before.us)
    return ClockOffset((before.us + after.us) / 2, max(before.bound_us, after.bound_us) + drift_us / 2)


class TracePass(RankPass):
    steps: RankSteps | None = None

    def run(self) -> Steps:
        measurement = self.measurement
        shares = measurement.shares_traced_step
        steps = 1 if shares else self.agreed(traced_steps(measurement.measure, measurement.step_s))
        with (
            measurement.log.during("trace", steps, measurement.step_s),
            _place(measurement.folder) as folder,
        ):
            subject, keep = measurement.subject, measurement.measure.keep_traces
            looking = measurement.inspected if shares else measurement.watched
            tracer = StepTracer(
                measurement.watch, subject.optimizer_spans, looking, subject.device, folder, measurement.meet
            )
            clocks = NodeClocks(subject.nodes) if subject.nodes > 1 else None
            tracer.warm()
            read = list[RankTrace]()
            for _ in range(steps):
                for _ in range(0 if shares else subject.step_period - 1):
                    # These steps are not traced: the one after them makes the inspected step's calls.
                    yield from measurement.step(nullcontext)
                before = None if clocks is None else clocks.offset()
                yield from measurement.step(tracer.step)
                after = None if clocks is None else clocks.offset()
                # The calls of an inspected step tell what each transfer was for.
                found = tracer.read(measurement.tap.calls)
                if found is not None:
                    apart = between(before, after) if before and after else None
                    read.append(replace(found, offset=apart))
                if not keep:
                    tracer.traced[-1].path.unlink(missing_ok=True)
            median, failure = tracer.median(), tracer.failure
            self.steps = RankSteps(
                steps=[] if failure else read, median=median, is_inspected=shares, failure=failure
            )
            if keep and failure is None:
                keep_trace(tracer.traced, median, folder)

    def part(self) -> RankSteps | None:
        return self.steps


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """Where traces are written: the rank's folder, or one that goes with the context."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="trace-") as temporary:
        yield Path(temporary)


PASS = TracePass
