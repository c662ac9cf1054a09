"""Runs a planned sweep to its end, whatever its cells do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from bench.common.command import again_command, tool_words
from bench.config import ExitCode, RunConfig
from bench.measure.trace.reader import KEPT_TRACE
from bench.plan.plan import Plan
from bench.plan.planned import PlannedCell
from bench.plan.stored import CONFIG, stored_sweep
from bench.plan.work import work_of
from bench.ranks.log import JOIN
from bench.record.record import Status, is_finding
from bench.record.store import RECORDS, Store, write_whole
from bench.request.modes import starts_ranks
from bench.run.cell.launcher import Launcher
from bench.run.cell.run import CellInterrupted, SharedSections, run
from bench.run.cell.trajectory import Trajectories
from bench.run.interrupts import Interrupts
from bench.run.node.job import RankEntry
from bench.run.node.lease import gpus_of, lease
from bench.run.progress import Progress
from bench.run.references import References
from bench.run.resume import Resumed, kept_records

TRACES_FOLDER = "traces"
WRITING = "writing the report"
"""Said before its figures are drawn, which takes some seconds."""

MAX_JOIN_HANGS = 2
"""Cells of a sweep that may hang in JOIN. The sweep then stops: every further one would wait as long."""
JOIN_HANG_CAUSES = (
    "Usual causes: NCCL cannot use peer-to-peer between PCIe boards (try NCCL_P2P_DISABLE=1); a wrong network"
    " interface (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME); a GPU that is lost or used by another process, or a"
    " container with too little /dev/shm (nvidia-smi, df -h /dev/shm). Set such a variable before the command"
    " that runs these cells again, or as env.NAME=value in a new sweep"
)

ReportWriter = Callable[[Path], bool]
"""Writes a folder's report; false where an experiment that has one right answer found another."""


@dataclass(slots=True)
class Sweep:
    """What the cells of a running sweep have in common."""

    plan: Plan
    """Grows while the sweep runs where records add cells to it."""
    launcher: Launcher
    progress: Progress
    store: Store
    shared: SharedSections
    trajectories: Trajectories
    references: References
    ran_out: set[str] = field(default_factory=set)
    """Ids of the cells whose first process ran out of memory, which are not repeated."""
    join_hangs: int = 0
    """Cells whose ranks could not connect, one after the other."""


def run_plan(
    plan: Plan,
    launcher: Launcher,
    progress: Progress,
    *,
    write_report: ReportWriter,
    entry: Callable[[PlannedCell], RankEntry | None] = lambda _: None,
    interrupts: Interrupts | None = None,
) -> ExitCode:
    """Run the cells, store each record as it comes, write the report; the sweep's exit code."""
    Resumed(plan)  # refuses another sweep's folder
    interrupts = interrupts or Interrupts()
    with Store(plan.folder) as store, ExitStack() as held:
        if store.size_bytes != plan.stored.size_bytes:  # another sweep ended here since the plan was made
            plan = replace(plan, stored=stored_sweep(plan.folder, plan.resume))
        kept = kept_records(plan, plan.stored.records)
        plan, pending = _whatever_is_missing(plan, kept.records)
        resumed = Resumed(plan)
        trajectories = Trajectories()
        trajectories.keep_finished([planned.cell for planned in plan.cells], kept.records)
        ranked = [each.cell for each in pending if starts_ranks(each.cell)]
        if ranked:
            # Before the server's imports, which would take the cores of a sweep that measures.
            held.enter_context(_lease(launcher, ranked, plan, progress))
            launcher.warm()
        if resumed.is_whole:
            _write_config(plan)
        progress.start(pending, plan.folder, [*resumed.lines, *kept.lines, *plan.notes])
        references = References(launcher, plan.folder, progress.say, progress.beside)
        sweep = Sweep(plan, launcher, progress, store, SharedSections(), trajectories, references)
        findings, is_interrupted = list[bool](), False
        try:
            for found in _run_all(sweep, pending, resumed, entry, interrupts, write_report):
                findings.append(found)
        except KeyboardInterrupt as interrupted:
            interrupts.begin_to_close()
            is_interrupted = True
            if isinstance(interrupted, CellInterrupted):
                store.append(interrupted.record)
        finally:
            progress.stop()
        _report_join_hangs(sweep.join_hangs, progress)
        return _conclude(plan, progress, write_report, findings, interrupts, is_interrupted=is_interrupted)


def _run_all(
    sweep: Sweep,
    pending: Sequence[PlannedCell],
    resumed: Resumed,
    entry: Callable[[PlannedCell], RankEntry | None],
    interrupts: Interrupts,
    write_report: ReportWriter,
) -> Iterator[bool]:
    """Run these cells and those that their records add; yield whether each ended as it may."""
    ran = set[str]()
    first_length = _first_length(sweep.plan, pending)
    while pending:
        for planned in pending:
            interrupts.raise_swallowed()
            ran.add(planned.folder_name)
            yield _run_one(planned, sweep, entry(planned))
            if sweep.join_hangs == MAX_JOIN_HANGS:
                return
            _report_after(first_length, planned, sweep.plan, sweep.progress, write_report)
        pending = _more(sweep, resumed, ran)


def _first_length(plan: Plan, pending: Sequence[PlannedCell]) -> PlannedCell | None:
    """Return the last cell before the first longer one.

    None where all have one length, where records decide, and where nothing runs: then all is done at once.
    """
    lengths = [each.cell.seq_len for each in pending]
    runs = any(starts_ranks(each.cell) for each in pending)
    if plan.grow is not None or not runs or len({*lengths}) < 2:  # noqa: PLR2004  lengths
        return None
    return pending[len([*takewhile(lambda length: length == lengths[0], lengths)]) - 1]


def _report_after(
    last: PlannedCell | None, ran: PlannedCell, plan: Plan, progress: Progress, write_report: ReportWriter
) -> None:
    """Once `last` ran, print and write the report of what there is. A fault in it costs no further cell."""
    if ran != last:
        return
    progress.say(f"the first length is done; the report so far is in {plan.folder}")
    try:
        with progress.paused():
            write_report(plan.folder)
    except Exception as error:  # noqa: BLE001  the report at the end meets it again, and says so
        progress.say(f"no report yet: {error}")


def _report_join_hangs(cells: int, progress: Progress) -> None:
    """Print the usual causes where the ranks of this many cells hung in JOIN."""
    if cells:
        stops = " in two cells, one after the other: the sweep stops" if cells == MAX_JOIN_HANGS else ""
        progress.say(f"ranks could not connect{stops}. {JOIN_HANG_CAUSES}")


def _lease(
    launcher: Launcher, cells: Sequence[RunConfig], plan: Plan, progress: Progress
) -> AbstractContextManager[object]:
    """That of the devices which these cells use here; on other machines agents hold theirs."""
    if not launcher.is_local:
        return nullcontext()
    return lease(gpus_of(cells), plan.lease, progress.say, folder=plan.folder)


def _conclude(
    plan: Plan,
    progress: Progress,
    write_report: ReportWriter,
    findings: Sequence[bool],
    interrupts: Interrupts,
    *,
    is_interrupted: bool,
) -> ExitCode:
    """Write the report and say how to go on; the exit code."""
    has_records, is_answered = (plan.folder / RECORDS).exists(), True
    if is_interrupted:
        what = "the report of what is there follows" if has_records else "no cell has ended yet"
        progress.say(f"interrupted; {what}")
    else:
        progress.say(WRITING)
    try:
        # Where not even the first cell came to a record, there is nothing to report.
        if has_records or not is_interrupted:
            with interrupts.listened_to():
                is_answered = write_report(plan.folder)
    except KeyboardInterrupt:
        is_interrupted = True
        progress.say(f"interrupted; for the report: {tool_words('analysis.report')} {plan.folder}")
    interrupts.begin_to_close()
    again = again_command(sys.argv, plan.folder)
    failed = findings.count(False)
    if is_interrupted:
        progress.say(f"to run what is missing: {again}")
        return ExitCode.INTERRUPTED
    if failed:
        progress.say(f"{failed} of {len(findings)} cells failed; to run them again: {again}")
    return ExitCode.FAILED if failed or not is_answered else ExitCode.OK


def _run_one(planned: PlannedCell, sweep: Sweep, entry: RankEntry | None) -> bool:
    """Run a cell and store its record; return whether it ended as it may."""
    if planned.repeat and planned.cell.cell_id in sweep.ran_out:
        sweep.progress.leave_out(planned)
        return True
    if planned.reason is None:
        reference = sweep.plan.references.get(work_of(planned.cell))
        sweep.references.run_missing(reference, sweep.trajectories, sweep.shared)
    sweep.progress.begin(planned)
    cells = sweep.store.folder / "cells"
    record = run(planned, sweep.launcher, cells, entry=entry, listener=sweep.progress, shared=sweep.shared)
    record = sweep.trajectories.held(planned.cell, record)
    _gather_traces(planned, cells, sweep.store.folder / TRACES_FOLDER)
    sweep.store.append(record)
    if record.status is Status.OUT_OF_MEMORY and not planned.repeat:
        sweep.ran_out.add(planned.cell.cell_id)
    sweep.progress.end(planned, record)
    if record.status is Status.TIMED_OUT and record.failure is not None and record.failure.phase == JOIN:
        sweep.join_hangs += 1
    elif record.status is not Status.UNSUPPORTED:
        sweep.join_hangs = 0
    return is_finding(record.role, record.status)


def _gather_traces(planned: PlannedCell, cells: Path, traces: Path) -> None:
    """Put the traces that a cell's ranks kept together: `<cell>-<rank>.json.gz`."""
    for rank in range(planned.cell.cluster.world_size):
        kept = cells / planned.folder_name / KEPT_TRACE.format(rank=rank)
        if kept.exists():
            traces.mkdir(exist_ok=True)
            kept.rename(traces / f"{planned.folder_name}-{rank}.json.gz")


def _more(sweep: Sweep, resumed: Resumed, ran: Collection[str]) -> list[PlannedCell]:
    """Add to the plan what the records add; return what of it is missing and did not run just now."""
    plan = sweep.plan
    if not plan.is_open:
        return []
    records = kept_records(plan, sweep.store.read()).records
    sweep.plan, pending = _whatever_is_missing(plan, records, ran, sweep.references.took_s)
    if resumed.is_whole:
        _write_config(sweep.plan)
    sweep.progress.add(pending, sweep.plan.note)
    return pending


def _whatever_is_missing(
    plan: Plan, records: Sequence[dict[str, Any]], ran: Collection[str] = (), beside_s: float = 0.0
) -> tuple[Plan, list[PlannedCell]]:
    """The plan, with more cells as long as nothing of it is missing, and what then is.

    A cell that `ran` just now is not run again, however it ended.
    """
    pending = _missing(plan, records, ran)
    while not pending and plan.is_open:
        before, plan = plan, plan.grown(records, beside_s)
        pending = _missing(plan, records, ran)
        if plan.grow is not None and len(plan.cells) == len(before.cells):
            break
    return plan, pending


def pending_cells(plan: Plan) -> list[PlannedCell]:
    """Return what the plan would begin with, in order; reads and writes nothing.

    Raises ConfigError, as running it would, where the folder holds another sweep.
    """
    Resumed(plan)  # refuses another sweep's folder
    return _whatever_is_missing(plan, kept_records(plan, plan.stored.records).records)[1]


def folder_lines(plan: Plan) -> list[str]:
    """Return what of the plan's folder differs from the plan: cells, and what made the records."""
    return [*Resumed(plan).lines, *kept_records(plan, plan.stored.records).lines]


def _missing(plan: Plan, records: Sequence[dict[str, Any]], ran: Collection[str]) -> list[PlannedCell]:
    """Return the cells without a final record that did not run just now.

    A cell whose first process ran out of memory is not repeated.
    """
    done = {
        (line["cell_id"], line["repeat"])
        for line in records
        if is_finding(line["role"], Status(line["status"]))
    }
    out_of_memory = (line for line in records if line["status"] == Status.OUT_OF_MEMORY)
    ran_out = {line["cell_id"] for line in out_of_memory if not line["repeat"]}
    missing = [p for p in plan.cells if (p.cell.cell_id, p.repeat) not in done]
    return [p for p in missing if p.folder_name not in ran and not (p.repeat and p.cell.cell_id in ran_out)]


def _write_config(plan: Plan) -> None:
    """The request, fully resolved, beside the records: one entry a cell, in running order."""
    content = {"argv": sys.argv, "cells": [planned.cell.flat() for planned in plan.cells]}
    write_whole(plan.folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(content)))
