"""The traced pass: full-length steps under the profiler, of which the median one is read."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.passes.rank_pass import RankPass, Steps
from bench.passes.trace.section import TRACED_STEPS
from bench.passes.trace.trace import StepTracer, keep_or_remove, read_step, warm_profiler
from bench.passes.trace.waiting import RankTrace


class TracePass(RankPass):
    trace: RankTrace | None = None

    def run(self) -> Steps:
        measurement = self.measurement
        if not measurement.measure.trace:
            return
        shares = measurement.shares_traced_step
        steps = 1 if shares else TRACED_STEPS
        with (
            measurement.log.during("trace", steps, measurement.step_s),
            _place(measurement.folder) as folder,
        ):
            subject = measurement.subject
            looking = measurement.inspected if shares else measurement.watched
            tracer = StepTracer(
                measurement.watch,
                subject.optimizer_spans,
                looking,
                subject.device,
                folder,
                measurement.meet,
            )
            warm_profiler(subject.device)
            for _ in range(steps):
                yield from measurement.step(tracer.step)
            traced = tracer.median()
            # The calls of an inspected step tell what each transfer was for.
            self.trace = read_step(traced, measurement.tap.calls, subject.device.type)
            keep_or_remove(traced, folder, keep=measurement.measure.keep_traces)

    def part(self) -> RankTrace | None:
        return self.trace


@contextmanager
def _place(folder: Path | None) -> Iterator[Path]:
    """Where traces are written: the rank's folder, or one that goes with the context."""
    if folder is not None:
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="trace-") as temporary:
        yield Path(temporary)


PASS = TracePass
