"""Run a planned sweep to its end, also if cells fail. `run_plan` comes first, then what it calls."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from omegaconf import OmegaConf

from bench.attention.kernel_facts import CUDNN, DEFAULT_KERNEL
from bench.common.command import resume_command, tool_command
from bench.config import ExitCode
from bench.measure.trace.reader import KEPT_TRACE_NAME
from bench.plan.plan import Plan
from bench.plan.planned import PlannedCell
from bench.plan.stored import CELLS, CONFIG
from bench.plan.work import work_of
from bench.ranks.log import JOIN
from bench.record.record import Record, Status, is_result
from bench.record.store import RECORDS, Store, write_atomically
from bench.request.kernel_choice import parity_fault
from bench.request.modes import starts_ranks
from bench.run.cell.launcher import Launcher
from bench.run.cell.run import CellInterrupted, SharedSections, run
from bench.run.interrupts import Interrupts
from bench.run.node.job import RankEntry
from bench.run.node.lease import gpus_of, lease
from bench.run.progress import Progress
from bench.run.references import References, Trajectories
from bench.run.resume import kept_records, plan_missing_cells, sweep_start

TRACES_FOLDER = "traces"
"""Subfolder of a sweep's folder for the kept traces of all cells."""
WRITING_REPORT = "writing the report"
"""Line that is printed before the figures are drawn, which takes some seconds."""

MAX_JOIN_HANGS = 2
"""Consecutive cells whose ranks hang while they connect (phase JOIN) before the sweep stops."""
JOIN_HANG_CAUSES = (
    "Usual causes: NCCL cannot use peer-to-peer between PCIe boards (try NCCL_P2P_DISABLE=1); the wrong"
    " network interface is used (set NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME); a GPU is lost or used by"
    " another process (see nvidia-smi); a container has too little /dev/shm (see df -h /dev/shm). Set a"
    " variable before the command that runs these cells again, or as env.NAME=value in a new sweep"
)
"""Advice for a sweep whose ranks could not connect."""

ReportWriter = Callable[[Path], bool]
"""Function that writes the report of a folder. It returns False if an experiment whose right answer is known
found another answer."""


@dataclass(slots=True)
class Sweep:
    """Running sweep: its plan, and the results and counts that its cells share."""

    plan: Plan
    """Cells of the sweep. In some experiments the records of finished cells add cells to it."""
    launcher: Launcher
    progress: Progress
    store: Store
    references: References
    trajectories: Trajectories = field(default_factory=Trajectories)
    shared: SharedSections = field(default_factory=SharedSections)
    attempted: set[str] = field(default_factory=set)
    """Folder names of the cells that have run, however they ended."""
    out_of_memory: set[str] = field(default_factory=set)
    """Ids of the cells whose first run ran out of memory, which are not repeated."""
    join_hangs: int = 0
    """Number of consecutive cells up to now whose ranks could not connect."""
    is_replanned: bool = False
    """Whether a cell has just changed the kernel of the plan, so that pending cells do not run."""
    are_results: list[bool] = field(default_factory=list)
    """For every cell that ran, whether its record is a result (`is_result`). If not, the cell has failed."""


def run_plan(
    plan: Plan,
    launcher: Launcher,
    progress: Progress,
    *,
    write_report: ReportWriter,
    entry: Callable[[PlannedCell], RankEntry | None] = lambda _: None,
    interrupts: Interrupts | None = None,
) -> ExitCode:
    """Run the cells of a plan, store every record at once, and write the report.

    `entry` returns the function that the ranks of a cell run; None stands for the passes of the cell.
    """
    interrupts, is_interrupted = interrupts or Interrupts(), False
    with Store(plan.folder) as store, ExitStack() as stack:
        start = sweep_start(plan)
        references = References(launcher, plan.folder, progress.print_line, progress.show_reference)
        sweep = Sweep(start.plan, launcher, progress, store, references)
        if start.records:
            cells = [planned.cell for planned in start.plan.cells]
            sweep.trajectories.add_finished(cells, start.records)
        if any(starts_ranks(planned.cell) for planned in start.pending):
            # The lease comes first: the imports of the fork server would take cores from another sweep.
            stack.enter_context(_lease(sweep, start.pending))
            launcher.warm()
        if start.covers_folder:
            _write_config(start.plan)
        progress.start(start.pending, plan.folder, [*start.lines, *plan.notes])
        end_of_first_length = _end_of_first_length(start.plan, start.pending)
        try:
            for planned in _next_cells(sweep, start.pending, writes_config=start.covers_folder):
                interrupts.raise_swallowed()
                sweep.are_results.append(_run_cell(planned, sweep, entry(planned)))
                if planned == end_of_first_length and sweep.join_hangs < MAX_JOIN_HANGS:
                    _report_so_far(sweep, write_report)
        except KeyboardInterrupt as interrupted:
            interrupts.ignore_signals()
            is_interrupted = True
            if isinstance(interrupted, CellInterrupted):
                store.append(interrupted.record)
        finally:
            progress.stop()
        return _conclude(sweep, write_report, interrupts, is_interrupted=is_interrupted)


def _next_cells(
    sweep: Sweep, pending: Sequence[PlannedCell], *, writes_config: bool
) -> Iterator[PlannedCell]:
    """Yield the pending cells, then the cells that records add to the plan.

    Stop when no cell is left, or when the ranks of MAX_JOIN_HANGS cells in a row could not connect.
    """
    while pending:
        for number, planned in enumerate(pending, 1):
            if sweep.join_hangs == MAX_JOIN_HANGS:
                return
            sweep.attempted.add(planned.folder_name)
            yield planned
            if sweep.is_replanned:
                for left in pending[number:]:
                    sweep.progress.remove(left)
                break
        if not (sweep.plan.is_open or sweep.is_replanned) or sweep.join_hangs == MAX_JOIN_HANGS:
            return
        sweep.is_replanned = False
        pending = _added_cells(sweep, writes_config=writes_config)


def _added_cells(sweep: Sweep, *, writes_config: bool) -> Sequence[PlannedCell]:
    """Let the records add cells to the plan, and return the cells that have not run yet."""
    records = kept_records(sweep.plan, sweep.store.read()).records
    sweep.plan, pending = plan_missing_cells(sweep.plan, records, sweep.attempted, sweep.references.total_s)
    if writes_config:
        _write_config(sweep.plan)
    sweep.progress.add(pending, sweep.plan.note)
    return pending


def _run_cell(planned: PlannedCell, sweep: Sweep, entry: RankEntry | None) -> bool:
    """Run a cell and store its record. If its work still lacks a reference, run the reference first.

    A repeat of a cell that ran out of memory is removed from the plan and does not run.

    Returns:
        False if the cell has failed, so that its record is no result (`is_result`).
    """
    if planned.repeat and planned.cell.cell_id in sweep.out_of_memory:
        sweep.progress.remove(planned)
        return True
    reference = sweep.plan.references.get(work_of(planned.cell)) if planned.reason is None else None
    if reference is not None:
        record = sweep.references.run_missing(reference, sweep.trajectories, sweep.shared)
        if record is not None and _changes_kernel(record, sweep):
            sweep.progress.remove(planned)
            return True
    sweep.progress.begin(planned)
    cells = sweep.store.folder / CELLS
    record = run(planned, sweep.launcher, cells, entry=entry, listener=sweep.progress, shared=sweep.shared)
    record = sweep.trajectories.compare(planned.cell, record)
    _gather_traces(planned, cells, sweep.store.folder / TRACES_FOLDER)
    sweep.store.append(record)
    sweep.progress.end(planned, record)
    _count_failures(planned, record, sweep)
    return _changes_kernel(record, sweep) or is_result(record.role, record.status)


def _changes_kernel(record: Record, sweep: Sweep) -> bool:
    """Plan again without cuDNN if this is the first parity check on it and it failed; return whether it is.

    The record stays in the file, as evidence, and the cell does not count as failed.
    """
    fault, plan_again = parity_fault(record), sweep.plan.plan_again
    if fault is None or plan_again is None:
        return False
    if fault:
        failed = f"the first parity check on {CUDNN} failed: {fault}"
        changed = plan_again(replace(sweep.plan.machine, cudnn_fault=failed))
        note = f"kernel=auto: {DEFAULT_KERNEL} for the whole sweep, because {failed}"
        sweep.plan, sweep.is_replanned = replace(changed, note=note), True
    else:
        sweep.plan = replace(sweep.plan, plan_again=None)
    return bool(fault)


def _gather_traces(planned: PlannedCell, cells: Path, traces: Path) -> None:
    """Move the kept traces of a cell's ranks into one folder, as `<cell>-<rank>.json.gz`."""
    for rank in range(planned.cell.cluster.world_size):
        trace = cells / planned.folder_name / KEPT_TRACE_NAME.format(rank=rank)
        if trace.exists():
            traces.mkdir(exist_ok=True)
            trace.rename(traces / f"{planned.folder_name}-{rank}.json.gz")


def _count_failures(planned: PlannedCell, record: Record, sweep: Sweep) -> None:
    """Record a cell that ran out of memory, which is not repeated, and cells whose ranks cannot connect."""
    if record.status is Status.OUT_OF_MEMORY and not planned.repeat:
        sweep.out_of_memory.add(planned.cell.cell_id)
    if record.status is Status.TIMED_OUT and record.failure is not None and record.failure.phase == JOIN:
        sweep.join_hangs += 1
    elif record.status is not Status.UNSUPPORTED:
        sweep.join_hangs = 0


def _end_of_first_length(plan: Plan, pending: Sequence[PlannedCell]) -> PlannedCell | None:
    """Return the last pending cell of the first sequence length, after which a first report is written.

    Return None if all cells have one length, if records decide which cells run, or if no cell starts ranks,
    as such cells take no time.
    """
    lengths = [planned.cell.seq_len for planned in pending]
    if plan.choose_cells is not None or len({*lengths}) < 2:  # noqa: PLR2004  lengths
        return None
    if not any(starts_ranks(planned.cell) for planned in pending):
        return None
    return pending[len([*takewhile(lambda length: length == lengths[0], lengths)]) - 1]


def _report_so_far(sweep: Sweep, write_report: ReportWriter) -> None:
    """Print and write the report of the finished cells. An error in the report does not stop the sweep."""
    progress, folder = sweep.progress, sweep.plan.folder
    progress.print_line(f"the first length is done; the report so far is in {folder}")
    try:
        with progress.without_bar():
            write_report(folder)
    except Exception as error:  # noqa: BLE001  the report at the end raises it again
        progress.print_line(f"no report yet: {error}; the sweep goes on, and the report follows at its end")


def _lease(sweep: Sweep, pending: Sequence[PlannedCell]) -> AbstractContextManager[object]:
    """Return the lease of this machine's devices that the pending cells use.

    If other nodes run the ranks, their agents lease the devices, and this lease is empty.
    """
    if not sweep.launcher.is_local:
        return nullcontext()
    gpus = gpus_of([planned.cell for planned in pending if starts_ranks(planned.cell)])
    return lease(gpus, sweep.plan.lease, sweep.progress.print_line, folder=sweep.plan.folder)


def _conclude(
    sweep: Sweep, write_report: ReportWriter, interrupts: Interrupts, *, is_interrupted: bool
) -> ExitCode:
    """Write the report, print how to continue, and return the exit code."""
    progress, folder = sweep.progress, sweep.plan.folder
    if sweep.join_hangs:
        has_stopped = sweep.join_hangs == MAX_JOIN_HANGS
        ending = "two cells in a row could not connect, so the sweep stops"
        progress.print_line(
            f"the ranks of {ending if has_stopped else 'a cell could not connect'}. {JOIN_HANG_CAUSES}"
        )
    has_records, is_answered = (folder / RECORDS).exists(), True
    if is_interrupted:
        outlook = "the report of the finished cells follows" if has_records else "no cell had ended"
        progress.print_line(f"interrupted; {outlook}")
    else:
        progress.print_line(WRITING_REPORT)
    try:
        # Without any record there is nothing to report.
        if has_records or not is_interrupted:
            with interrupts.listening():
                is_answered = write_report(folder)
    except KeyboardInterrupt:
        is_interrupted = True
        progress.print_line(
            f"interrupted while writing the report; to write it: {tool_command('analysis.report')} {folder}"
        )
    interrupts.ignore_signals()
    resume = resume_command(sys.argv, folder)
    failed = sweep.are_results.count(False)
    if is_interrupted:
        progress.print_line(f"to run what is missing: {resume}")
        return ExitCode.INTERRUPTED
    if failed:
        progress.print_line(f"{failed} of {len(sweep.are_results)} cells failed; to run them again: {resume}")
    return ExitCode.FAILED if failed or not is_answered else ExitCode.OK


def _write_config(plan: Plan) -> None:
    """Write the resolved request next to the records, with one entry for each cell in running order."""
    content = {"argv": sys.argv, "cells": [planned.cell.flat() for planned in plan.cells]}
    write_atomically(plan.folder / CONFIG, OmegaConf.to_yaml(OmegaConf.create(content)))
