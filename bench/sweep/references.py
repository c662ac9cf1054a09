"""Runs `local` for work of which a sweep has no cell that others could be compared with.

Such a cell is no result: its record is not stored, and its budget is stated.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from bench.cell.launcher import Launcher
from bench.cell.planned import PlannedCell
from bench.cell.run import CellInterrupted, SharedSections, run
from bench.cell.trajectory import MAX_COMPARED_STEPS, REFERENCE_STRATEGY, Trajectories, is_base, work_of
from bench.cell.watch import SILENT, Listener
from bench.config import RunConfig
from bench.cost.fit import Fit
from bench.environment import Machine, this_machine
from bench.labels import duration_label, length_label, size_label
from bench.record import Role, Status
from bench.request.legality import refusal
from bench.request.placement import of_fewer_ranks
from bench.strategies import STRATEGIES
from bench.sweep.room import room_of
from bench.training.trainer_facts import NATIVE

FOLDER = "references"
STEPS_SHARE = 0.5
"""Of the budget, for steps; starting, checks and ending take the rest."""


class References:
    """Who is missing among the planned cells, run when the first other cell of its work is about to."""

    def __init__(
        self,
        cells: Sequence[RunConfig],
        launcher: Launcher,
        folder: Path,
        say: Callable[[str], None],
        shown: Callable[[PlannedCell], AbstractContextManager[Listener]] = lambda _: nullcontext(SILENT),
    ) -> None:
        """`shown` shows a reference while it runs."""
        self.launcher = launcher
        self.folder = folder
        self.say = say
        self.shown = shown
        self.took_s = 0.0
        """Seconds of the references so far."""
        self._settled = {work_of(cell) for cell in cells if is_base(cell)}

    def run_missing(self, cell: RunConfig, trajectories: Trajectories, shared: SharedSections) -> None:
        """Give the trajectories a reference for this cell's work, unless one is planned or was tried."""
        reference = _missing_reference(cell, self._settled)
        if reference is None or trajectories.know(work_of(cell)):
            return
        self._settled.add(work_of(cell))
        reason = why_not_tried(reference, this_machine())
        if reason is not None:
            self.say(reason)
            return
        self.say(
            f"{length_label(cell.seq_len)}: {REFERENCE_STRATEGY} runs first, for at most"
            f" {duration_label(reference.measure.timeout_s)}, because others are compared with its losses"
        )
        planned = PlannedCell(reference, repeat=0, order=0, role=Role.REFERENCE)
        try:
            with self.shown(planned) as listener:
                record = run(planned, self.launcher, self.folder / FOLDER, listener=listener, shared=shared)
        except CellInterrupted:
            raise KeyboardInterrupt from None  # its record is none of the sweep's
        self.took_s += record.wall_s or 0.0
        if record.status is Status.OK:
            trajectories.held(reference, record)
        else:
            self.say(f"{length_label(cell.seq_len)}: no reference, {record.status}: {record.reason}")


def missing_references(cells: Sequence[RunConfig]) -> list[RunConfig]:
    """The cells of `local` that a sweep of these cells runs besides them, once for each work."""
    settled, found = {work_of(cell) for cell in cells if is_base(cell)}, list[RunConfig]()
    for cell in cells:
        reference = _missing_reference(cell, settled)
        if reference is not None:
            settled.add(work_of(cell))
            found.append(reference)
    return found


def _missing_reference(cell: RunConfig, settled: Collection[str]) -> RunConfig | None:
    """The reference of a cell that trains, unless its work is settled; None where nobody wants one."""
    is_wanted = cell.workload.name == "train" and cell.measure.reference_budget_s > 0
    if not is_wanted or refusal(cell) is not None or work_of(cell) in settled:
        return None
    return reference_of(cell)


def why_not_tried(reference: RunConfig, machine: Machine) -> str | None:
    """Why a reference does not run, in a line: it would run out of memory. None where it may fit."""
    room = room_of(reference, machine)
    if room is None or room.fit is not Fit.OUT_OF_MEMORY:
        return None
    return (
        f"{length_label(reference.seq_len)}: {REFERENCE_STRATEGY} does not run as a reference: a rank needs"
        f" {room.needed_label} and may use {size_label(room.usable)}; others are compared with the first"
        " sound cell"
    )


def reference_of(cell: RunConfig) -> RunConfig | None:
    """The native loop's cell of `local` that does the same work on one rank a sequence; None where none can.

    It is timed for nobody, so its budget alone limits its steps.
    """
    facts = STRATEGIES[REFERENCE_STRATEGY]
    threads = min(cell.cluster.threads_per_rank * cell.sp_degree, len(os.sched_getaffinity(0)))
    reference = replace(
        cell,
        strategy=REFERENCE_STRATEGY,
        options=(),
        layout=facts.default_layout,
        sp_degree=1,
        ulysses_degree=1,
        padding=0,
        trainer=NATIVE,
        cluster=replace(of_fewer_ranks(cell.cluster, cell.dp_degree), threads_per_rank=threads),
        measure=replace(
            cell.measure,
            steps=MAX_COMPARED_STEPS,
            warmup_s=0.0,
            least_steps=0,
            budget_s=STEPS_SHARE * cell.measure.reference_budget_s,
            timeout_s=min(cell.measure.timeout_s, cell.measure.reference_budget_s),
            trace=False,
            keep_traces=False,
        ),
    )
    same_work = work_of(reference) == work_of(cell)
    return reference if same_work and refusal(reference) is None else None
