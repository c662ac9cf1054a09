"""Runs a planned sweep to its end, whatever its cells do: `run_plan`, and below it what it does, in order."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from omegaconf import OmegaConf

from bench.common.command import again_command, tool_words
from bench.config import ExitCode
from bench.measure.trace.reader import KEPT_TRACE
from bench.plan.plan import Plan
from bench.plan.planned import PlannedCell
from bench.plan.stored import CONFIG
from bench.plan.work import work_of
from bench.ranks.log import JOIN
from bench.record.record import Record, Status, is_finding
from bench.record.store import RECORDS, Store, write_whole
from bench.request.modes import starts_ranks
from bench.run.cell.launcher import Launcher
from bench.run.cell.run import CellInterrupted, SharedSections, run
from bench.run.interrupts import Interrupts
from bench.run.node.job import RankEntry
from bench.run.node.lease import gpus_of, lease
from bench.run.progress import Progress
from bench.run.references import References, Trajectories
from bench.run.resume import kept_records, sweep_start, with_missing

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
    """A running sweep: its plan, and results and counts that its cells share."""

    plan: Plan
    """Grows while the sweep runs where records add cells to it."""
    launcher: Launcher
    progress: Progress
    store: Store
    references: References
    trajectories: Trajectories = field(default_factory=Trajectories)
    shared: SharedSections = field(default_factory=SharedSections)
    ran: set[str] = field(default_factory=set)
    """Folder names of the cells that ran, however they ended."""
    ran_out: set[str] = field(default_factory=set)
    """Ids of the cells whose first process ran out of memory, which are not repeated."""
    join_hangs: int = 0
    """Cells whose ranks could not connect, one after the other."""
    findings: list[bool] = field(default_factory=list)
    """For each cell that ran, whether it ended as it may."""


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
    interrupts, is_interrupted = interrupts or Interrupts(), False
    with Store(plan.folder) as store, ExitStack() as held:
        start = sweep_start(plan)
        references = References(launcher, plan.folder, progress.say, progress.show_reference)
        sweep = Sweep(start.plan, launcher, progress, store, references)
        if start.records:
            sweep.trajectories.keep_finished([each.cell for each in start.plan.cells], start.records)
        if any(starts_ranks(planned.cell) for planned in start.pending):
            # Before the server's imports, which would take the cores of a sweep that measures.
            held.enter_context(_lease(sweep, start.pending))
            launcher.warm()
        if start.is_whole:
            _write_config(start.plan)
        progress.start(start.pending, plan.folder, [*start.lines, *plan.notes])
        first_length_ends = _end_of_first_length(start.plan, start.pending)
        try:
            for planned in _cells(sweep, start.pending, writes_config=start.is_whole):
                interrupts.raise_swallowed()
                sweep.findings.append(_run_cell(planned, sweep, entry(planned)))
                if planned == first_length_ends and sweep.join_hangs < MAX_JOIN_HANGS:
                    _report_so_far(sweep, write_report)
        except KeyboardInterrupt as interrupted:
            interrupts.begin_to_close()
            is_interrupted = True
            if isinstance(interrupted, CellInterrupted):
                store.append(interrupted.record)
        finally:
            progress.stop()
        return _conclude(sweep, write_report, interrupts, is_interrupted=is_interrupted)


def _cells(sweep: Sweep, pending: Sequence[PlannedCell], *, writes_config: bool) -> Iterator[PlannedCell]:
    """Yield the next cell: one of these, then one that the records add, as long as ranks can connect."""
    while pending:
        for planned in pending:
            if sweep.join_hangs == MAX_JOIN_HANGS:
                return
            sweep.ran.add(planned.folder_name)
            yield planned
        if not sweep.plan.is_open or sweep.join_hangs == MAX_JOIN_HANGS:
            return
        pending = _added_cells(sweep, writes_config=writes_config)


def _added_cells(sweep: Sweep, *, writes_config: bool) -> Sequence[PlannedCell]:
    """Add to the plan what the records add; return what of it is missing and did not run just now."""
    records = kept_records(sweep.plan, sweep.store.read()).records
    sweep.plan, pending = with_missing(sweep.plan, records, sweep.ran, sweep.references.took_s)
    if writes_config:
        _write_config(sweep.plan)
    sweep.progress.add(pending, sweep.plan.note)
    return pending


def _run_cell(planned: PlannedCell, sweep: Sweep, entry: RankEntry | None) -> bool:
    """Run a cell, before it the reference that its work lacks, and store its record.

    Return whether the cell ended as it may.
    """
    if planned.repeat and planned.cell.cell_id in sweep.ran_out:
        sweep.progress.leave_out(planned)
        return True
    reference = sweep.plan.references.get(work_of(planned.cell)) if planned.reason is None else None
    if reference is not None:
        sweep.references.run_missing(reference, sweep.trajectories, sweep.shared)
    sweep.progress.begin(planned)
    cells = sweep.store.folder / "cells"
    record = run(planned, sweep.launcher, cells, entry=entry, listener=sweep.progress, shared=sweep.shared)
    record = sweep.trajectories.compare(planned.cell, record)
    _gather_traces(planned, cells, sweep.store.folder / TRACES_FOLDER)
    sweep.store.append(record)
    sweep.progress.end(planned, record)
    _count_failures(planned, record, sweep)
    return is_finding(record.role, record.status)


def _gather_traces(planned: PlannedCell, cells: Path, traces: Path) -> None:
    """Put the traces that a cell's ranks kept together: `<cell>-<rank>.json.gz`."""
    for rank in range(planned.cell.cluster.world_size):
        kept = cells / planned.folder_name / KEPT_TRACE.format(rank=rank)
        if kept.exists():
            traces.mkdir(exist_ok=True)
            kept.rename(traces / f"{planned.folder_name}-{rank}.json.gz")


def _count_failures(planned: PlannedCell, record: Record, sweep: Sweep) -> None:
    """Count the failures that decide which cells still run."""
    if record.status is Status.OUT_OF_MEMORY and not planned.repeat:
        sweep.ran_out.add(planned.cell.cell_id)
    if record.status is Status.TIMED_OUT and record.failure is not None and record.failure.phase == JOIN:
        sweep.join_hangs += 1
    elif record.status is not Status.UNSUPPORTED:
        sweep.join_hangs = 0


def _end_of_first_length(plan: Plan, pending: Sequence[PlannedCell]) -> PlannedCell | None:
    """Return the last cell before the first longer one.

    None where all have one length, where records decide, and where nothing runs: then all is done at once.
    """
    lengths = [each.cell.seq_len for each in pending]
    if plan.grow is not None or len({*lengths}) < 2:  # noqa: PLR2004  lengths
        return None
    if not any(starts_ranks(each.cell) for each in pending):
        return None
    return pending[len([*takewhile(lambda length: length == lengths[0], lengths)]) - 1]


def _report_so_far(sweep: Sweep, write_report: ReportWriter) -> None:
    """Print and write the report of what there is. A fault in it costs no further cell."""
    progress, folder = sweep.progress, sweep.plan.folder
    progress.say(f"the first length is done; the report so far is in {folder}")
    try:
        with progress.paused():
            write_report(folder)
    except Exception as error:  # noqa: BLE001  the report at the end meets it again, and says so
        progress.say(f"no report yet: {error}")


def _lease(sweep: Sweep, pending: Sequence[PlannedCell]) -> AbstractContextManager[object]:
    """Return the lease of the devices that these cells use here; on other machines agents hold theirs."""
    if not sweep.launcher.is_local:
        return nullcontext()
    gpus = gpus_of([planned.cell for planned in pending if starts_ranks(planned.cell)])
    return lease(gpus, sweep.plan.lease, sweep.progress.say, folder=sweep.plan.folder)


def _conclude(
    sweep: Sweep, write_report: ReportWriter, interrupts: Interrupts, *, is_interrupted: bool
) -> ExitCode:
    """Write the report and say how to go on; the exit code."""
    progress, folder = sweep.progress, sweep.plan.folder
    if sweep.join_hangs:
        stops = " in two cells, one after the other: the sweep stops"
        stops = stops if sweep.join_hangs == MAX_JOIN_HANGS else ""
        progress.say(f"ranks could not connect{stops}. {JOIN_HANG_CAUSES}")
    has_records, is_answered = (folder / RECORDS).exists(), True
    if is_interrupted:
        what = "the report of what is there follows" if has_records else "no cell has ended yet"
        progress.say(f"interrupted; {what}")
    else:
        progress.say(WRITING)
    try:
        # Where not even the first cell came to a record, there is nothing to report.
        if has_records or not is_interrupted:
            with interrupts.listening():
                is_answered = write_report(folder)
    except KeyboardInterrupt:
        is_interrupted = True
        progress.say(f"interrupted; for the report: {tool_words('analysis.report')} {folder}")
    interrupts.begin_to_close()
    again = again_command(sys.argv, folder)
    failed = sweep.findings.count(False)
    if is_interrupted:
        progress.say(f"to run what is missing: {again}")
        return ExitCode.INTERRUPTED
    if failed:
        progress.say(f"{failed} of {len(sweep.findings)} cells failed; to run them again: {again}")
    return ExitCode.FAILED if failed or not is_answered else ExitCode.OK


def _write_config(plan: Plan) -> None:
    """Write the request, fully resolved, next to the records: one entry a cell, in running order."""
    content = {"argv": sys.argv, "cells": [planned.cell.flat() for planned in plan.cells]}
    write_whole(plan.folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(content)))
