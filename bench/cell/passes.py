"""The passes of a built cell, in order."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.passes.engagement.inspection import Inspection
from bench.passes.engagement.modules import watch_modules
from bench.passes.memory.memory import MemoryWatch
from bench.passes.telemetry.telemetry import Telemetry, open_nvml
from bench.passes.timing.timing import TimedSteps, time_steps
from bench.passes.trace.optimizer_spans import method_spans
from bench.passes.trace.trace import StepTracer, keep_or_remove, read_step, warm_profiler
from bench.passes.workload import Workload
from bench.ranks.log import TRACED_STEPS, RankLog, Stage, WrongResultError
from bench.ranks.memory_limit import without_memory_limit


@dataclass(frozen=True, slots=True)
class BuiltCell:
    """A cell on one rank, ready to run."""

    workload: Workload
    folder: Path
    memory: MemoryWatch
    parity_is_known: bool


def run_passes(built: BuiltCell, log: RankLog) -> dict[str, Any]:
    """This rank's part of every section; what all ranks agree on is the same on every rank."""
    workload, cell, device = built.workload, built.workload.cell, built.workload.rank.device
    sections: dict[str, Any] = {}
    if cell.measure.gradients:
        with log.during("gradients"):
            workload.write_gradients(built.folder)
    if not built.parity_is_known:
        with log.during("parity"), without_memory_limit():
            sections["parity"] = _parity(workload, log)
    with log.during("timing"):
        with watch_modules(workload.rank.strategy.package_name + ".") as modules, built.memory.life:
            workload.short_step()
        beside = cell.cluster.ranks_beside(workload.rank.strategy.groups.rank)
        telemetry = Telemetry(partial(open_nvml, device, ranks_beside=beside))
        timed = time_steps(
            workload.step, cell, device, log.tell, partial(watched_window, built.memory, telemetry)
        )
    sections["timing"] = {
        "step_times_ms": timed.step_times_ms,
        "window_ms": timed.window_ms,
        "warmup": timed.warmup,
    }
    with log.during(workload.own_phase):
        sections |= workload.sections(timed)
    sections["telemetry"] = asdict(telemetry.read())
    sections |= _look_inside(built, timed, sorted(modules), log)
    sections["memory"] = asdict(built.memory.read()) | {"limit_base_bytes": log.limit_base_bytes}
    return sections


def _look_inside(built: BuiltCell, timed: TimedSteps, modules: list[str], log: RankLog) -> dict[str, Any]:
    """Engagement and trace, from steps that nobody times."""
    workload, rank = built.workload, built.workload.rank
    sections: dict[str, Any] = {}
    inspection = Inspection(rank.strategy.watched, built.memory.steady)
    # A long step hides what looking costs; a short one does not, and then there is time for one more.
    shares_step = workload.cell.measure.trace and timed.warmup == "short"
    step_s = statistics.median(timed.step_times_ms) / 1e3
    if not shares_step:
        with log.during("engagement", 1, step_s), inspection.looking():
            workload.step(timed.next_step)
    if workload.cell.measure.trace:
        steps = range(timed.next_step, timed.next_step + (1 if shares_step else TRACED_STEPS))
        with log.during("trace", len(steps), step_s):
            sections["trace"] = _trace(built, inspection, steps, shares_step=shares_step)
    sections["engagement"] = inspection.engagement(rank.wiring.attention_name, modules)
    return sections


def _parity(workload: Workload, log: RankLog) -> dict[str, Any]:
    """Errors and limits of all checks; raises WrongResultError where one is beyond its limit."""
    section: dict[str, Any] = {"checked_in": workload.cell.cell_id, "errors": {}, "limits": {}}
    for name, check in workload.checks().items():
        log.tell(Stage("parity", name))
        outcome = check()
        if outcome.divergence is not None:
            raise WrongResultError(f"{name} parity: {outcome.divergence}")
        section["tokens"] = outcome.tokens
        section["errors"] |= outcome.errors
        section["limits"] |= outcome.limits
    return section


def _trace(built: BuiltCell, inspection: Inspection, steps: range, *, shares_step: bool) -> dict[str, Any]:
    """Trace full-length steps; the calls of an inspected step tell what each transfer was for."""
    workload, device, folder = built.workload, built.workload.rank.device, built.folder
    looking = inspection.looking if shares_step else inspection.watching
    optimizing = partial(method_spans, workload.optimizer, "update")
    tracer = StepTracer(inspection.watch, optimizing, looking, device, folder)
    warm_profiler(device)
    for number in steps:
        with tracer.step():
            workload.step(number)
    traced = tracer.median()
    section = read_step(traced, inspection.tap.calls, device.type)
    keep_or_remove(traced, folder, keep=workload.cell.measure.keep_traces)
    return section


@contextmanager
def watched_window(memory: MemoryWatch, telemetry: Telemetry) -> Iterator[None]:
    """Around a timed window: nothing of it runs between the steps."""
    memory.start_window()
    with telemetry.window():
        yield
    memory.end_window()
