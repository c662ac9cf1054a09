"""Trace pass on a rank: full-length steps under torch.profiler, whose traces are read after each step."""

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

from bench.measure.rank_pass import RankPass, StepRequests
from bench.measure.trace.section import RankTracedSteps, traced_steps
from bench.measure.trace.tracer import StepTracer, keep_trace
from bench.measure.trace.waiting import ClockOffset, RankTrace

PINGS = 30
"""Number of round trips in one comparison of two clocks. Only the shortest is used; its median error over
gloo on one machine is 3 to 10 us."""


class NodeClocks:
    """Comparison of the nodes' clocks, by messages between rank 0 and the first rank of each node."""

    def __init__(self, nodes: int) -> None:
        """Create a gloo group; every rank must call this.

        Args:
            nodes: Number of nodes; each has the same number of consecutive ranks.
        """
        self._ranks_per_node = dist.get_world_size() // nodes
        self._first_ranks = range(0, dist.get_world_size(), self._ranks_per_node)
        is_gloo = dist.get_backend() == "gloo"
        group: Any = dist.group.WORLD if is_gloo else dist.new_group(backend="gloo")
        self._group: dist.ProcessGroup = group

    def offset(self) -> ClockOffset:
        """Return this node's clock less the clock of rank 0, measured now; every rank must call this."""
        by_node_ns = torch.zeros(len(self._first_ranks), 2, dtype=torch.int64)
        for node, first_rank in enumerate(self._first_ranks):
            if dist.get_rank() == 0 and first_rank != 0:
                by_node_ns[node] = self._compare_with(first_rank)
            elif dist.get_rank() == first_rank != 0:
                self._answer()
        dist.broadcast(by_node_ns, 0, group=self._group)
        offset_ns, round_trip_ns = by_node_ns[dist.get_rank() // self._ranks_per_node].tolist()
        return ClockOffset(offset_ns / 1e3, round_trip_ns / 2e3)

    def _compare_with(self, rank: int) -> torch.Tensor:
        """Return the offset of a rank's clock and the shortest round trip, both in ns; runs on rank 0.

        The offset is the rank's clock less this clock at the middle of the shortest round trip.
        """
        remote_ns, trips = torch.zeros(1, dtype=torch.int64), []
        for _ in range(PINGS):
            sent_ns = time.monotonic_ns()
            dist.send(remote_ns, rank, group=self._group)
            dist.recv(remote_ns, rank, group=self._group)
            received_ns = time.monotonic_ns()
            trips.append((received_ns - sent_ns, int(remote_ns) - (sent_ns + received_ns) // 2))
        round_trip_ns, offset_ns = min(trips)
        return torch.tensor([offset_ns, round_trip_ns])

    def _answer(self) -> None:
        """Answer the messages of rank 0 with this rank's clock."""
        clock_ns = torch.zeros(1, dtype=torch.int64)
        for _ in range(PINGS):
            dist.recv(clock_ns, 0, group=self._group)
            clock_ns.fill_(time.monotonic_ns())
            dist.send(clock_ns, 0, group=self._group)


def mean_offset(before: ClockOffset, after: ClockOffset) -> ClockOffset:
    """Return the mean of the offsets before and after a step; half their drift adds to the error."""
    drift_us = abs(after.offset_us - before.offset_us)
    bound_us = max(before.bound_us, after.bound_us) + drift_us / 2
    return ClockOffset((before.offset_us + after.offset_us) / 2, bound_us)


class TracePass(RankPass):
    result: RankTracedSteps | None = None

    def run(self) -> StepRequests:
        """Trace steps and read the trace of each; `measure.keep_traces` stores the trace of median length.

        If steps are so long that the budget has time for one untimed step only, that step is both traced and
        inspected. On several nodes the clocks are compared before and after every traced step.
        """
        measurement = self.measurement
        is_inspected = measurement.inspects_traced_step
        n_steps = (
            1 if is_inspected else self.broadcast_count(traced_steps(measurement.measure, measurement.step_s))
        )
        with (
            measurement.log.run_phase("trace", n_steps, measurement.step_s),
            _trace_folder(measurement.folder) as folder,
        ):
            subject, keep = measurement.subject, measurement.measure.keep_traces
            around_step = measurement.inspect_step if is_inspected else measurement.watch_attention
            tracer = StepTracer(
                measurement.watch,
                subject.optimizer_spans,
                around_step,
                subject.device,
                folder,
                measurement.raise_if_rank_failed,
            )
            clocks = NodeClocks(subject.nodes) if subject.nodes > 1 else None
            tracer.warm_up()
            traces = list[RankTrace]()
            for _ in range(n_steps):
                for _ in range(0 if is_inspected else subject.step_period - 1):
                    # The calls of a step repeat after `step_period` steps. Untraced steps bring the traced
                    # step to the inspected step's place in this period, so that its calls are equal.
                    yield from measurement.step(nullcontext)
                before = None if clocks is None else clocks.offset()
                yield from measurement.step(tracer.step)
                after = None if clocks is None else clocks.offset()
                # The calls of the inspected step give the purpose of each communication.
                trace = tracer.read(measurement.tap.calls)
                if trace is not None:
                    offset = mean_offset(before, after) if before and after else None
                    traces.append(replace(trace, offset=offset))
                if not keep:
                    tracer.traced[-1].path.unlink(missing_ok=True)
            median, failure = tracer.median_step(), tracer.failure
            self.result = RankTracedSteps(
                steps=[] if failure else traces, median=median, is_inspected=is_inspected, failure=failure
            )
            if keep and failure is None:
                keep_trace(tracer.traced, median, folder)

    def part(self) -> RankTracedSteps | None:
        return self.result


@contextmanager
def _trace_folder(folder: Path | None) -> Iterator[Path]:
    """Yield `folder`; if it is None, a temporary folder that is removed at the end."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="trace-") as temporary:
        yield Path(temporary)


PASS = TracePass
