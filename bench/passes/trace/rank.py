"""The traced pass: full-length steps under the profiler, each read as soon as it is over."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from bench.passes.rank_pass import RankPass, Steps
from bench.passes.trace.node_clocks import NodeClocks, between
from bench.passes.trace.section import RankSteps, traced_steps
from bench.passes.trace.trace import StepTracer, keep_trace
from bench.passes.trace.waiting import RankTrace


class TracePass(RankPass):
    steps: RankSteps | None = None

    def run(self) -> Steps:
        measurement = self.measurement
        if not measurement.measure.trace:
            return
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
                if not shares:
                    yield from self._up_to_a_step_like_the_inspected_one()
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

    def _up_to_a_step_like_the_inspected_one(self) -> Steps:
        """Steps that nobody looks at, for the next to make the calls that the inspected one made."""
        for _ in range(self.measurement.subject.step_period - 1):
            yield from self.measurement.step(nullcontext)

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
