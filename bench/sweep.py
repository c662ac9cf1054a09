"""A sweep: planned as a whole before its first cell starts, then run to its end whatever cells do."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf

from bench import words
from bench.cell import CellInterrupted, PlannedCell, run
from bench.command_line import refuse_too_many
from bench.conf_files import Raw
from bench.config import ConfigError, RunConfig
from bench.environment import Machine
from bench.experiments import experiment_of
from bench.launcher import Launcher
from bench.legality import refusal
from bench.measure.trace_reader import KEPT_TRACE
from bench.next_steps import again_command
from bench.parity_cache import ParityCache
from bench.progress import Progress
from bench.record import FINDINGS, Record, Status
from bench.store import Store
from bench.strategies import STRATEGIES

if TYPE_CHECKING:
    from bench.worker import RankEntry

TRACES_FOLDER = "traces"
EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130

ReportWriter = Callable[[Path], None]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a sweep will run, in order, and where its records go."""

    cells: tuple[PlannedCell, ...]
    folder: Path
    resume: bool


def plan(raws: Sequence[Raw], machine: Machine, *, single: bool) -> Plan:
    """Validate every cell, drop duplicates, repeat, and shuffle by the seed.

    Order is random so that heat and neighbours favour no strategy. Raises ConfigError for the first bad
    value; in a single run also for an illegal combination, which a sweep records as `unsupported`.
    """
    refuse_too_many([len(raws)])
    cells = {cell.cell_id: cell for cell in experiment_of(raws).cells(raws, machine)}
    for cell in cells.values():
        _refuse_failing_facts(cell)
        if single:
            _refuse_illegal(cell)
    refuse_too_many([len(cells), max(cell.measure.repeats for cell in cells.values())])
    pairs = [(cell, repeat) for cell in cells.values() for repeat in range(cell.measure.repeats)]
    random.Random(min(cell.seed for cell in cells.values())).shuffle(pairs)
    planned = (PlannedCell(cell, repeat, order) for order, (cell, repeat) in enumerate(pairs))
    first = raws[0]
    resume = words.flag("resume", first["resume"])
    return Plan(tuple(planned), Path(words.text("sweep_dir", first["sweep_dir"])), resume)


def run_plan(
    plan: Plan,
    launcher: Launcher,
    progress: Progress,
    *,
    write_report: ReportWriter,
    entry: Callable[[PlannedCell], RankEntry | None] = lambda _: None,
) -> int:
    """Run the cells, store each record as it comes, write the report; the sweep's exit code.

    0 when every cell that could run did, 1 when some failed, 130 when interrupted.
    """
    if plan.resume and not plan.folder.exists():
        raise ConfigError(
            f"resume=true: sweep_dir={plan.folder} is not there; name the folder of the sweep that broke off"
        )
    with Store(plan.folder) as store:
        before = store.read()
        pending = _pending(plan, before)
        launcher.warm()
        _write_config(plan)
        progress.start(pending, plan.folder)
        parities, statuses = ParityCache(), list[Status]()
        is_interrupted = False
        try:
            for planned in pending:
                statuses.append(_run_one(planned, launcher, progress, store, parities, entry(planned)))
        except KeyboardInterrupt as interrupted:
            is_interrupted = True
            if isinstance(interrupted, CellInterrupted):
                store.append(interrupted.record)
        finally:
            progress.stop()
        return _conclude(plan, progress, write_report, statuses, is_interrupted=is_interrupted)


def _conclude(
    plan: Plan,
    progress: Progress,
    write_report: ReportWriter,
    statuses: Sequence[Status],
    *,
    is_interrupted: bool,
) -> int:
    """Write the report and say how to go on; the exit code."""
    if is_interrupted:
        progress.say("interrupted; the report of what is there follows")
    try:
        write_report(plan.folder)
    except KeyboardInterrupt:
        is_interrupted = True
        progress.say(f"interrupted; for the report: python -m analysis.report {plan.folder}")
    again = again_command(sys.argv, plan.folder)
    failed = sum(status not in FINDINGS for status in statuses)
    if is_interrupted:
        progress.say(f"to run what is missing: {again}")
        return EXIT_INTERRUPTED
    if failed:
        progress.say(f"{failed} of {len(statuses)} cells failed; to run them again: {again}")
    return EXIT_FAILED if failed else EXIT_OK


def _run_one(
    planned: PlannedCell,
    launcher: Launcher,
    progress: Progress,
    store: Store,
    parities: ParityCache,
    entry: RankEntry | None,
) -> Status:
    progress.begin(planned)
    cells = store.folder / "cells"
    record: Record = run(
        planned,
        launcher,
        cells,
        entry=entry,
        listener=progress,
        known_parity=parities.find(planned.cell),
    )
    parities.keep(planned.cell, record)
    _gather_traces(planned, cells, store.folder / TRACES_FOLDER)
    store.append(record)
    progress.end(planned, record)
    return record.status


def _gather_traces(planned: PlannedCell, cells: Path, traces: Path) -> None:
    """Put the traces that a cell's ranks kept together: `<cell>-<rank>.json.gz`."""
    for rank in range(planned.cell.cluster.world_size):
        kept = cells / planned.folder_name / KEPT_TRACE.format(rank=rank)
        if kept.exists():
            traces.mkdir(exist_ok=True)
            kept.rename(traces / f"{planned.folder_name}-{rank}.json.gz")


def _pending(plan: Plan, before: Sequence[dict[str, Any]]) -> list[PlannedCell]:
    """Cells without a final record; with records but without `resume` the folder is somebody's."""
    if before and not plan.resume:
        raise ConfigError(
            f"sweep_dir={plan.folder}: holds records already; add resume=true to run only what is missing,"
            " or name another folder"
        )
    done = {(line["cell_id"], line["repeat"]) for line in before if line["status"] in FINDINGS}
    return [p for p in plan.cells if (p.cell.cell_id, p.repeat) not in done]


def _write_config(plan: Plan) -> None:
    """What was asked for, fully resolved, beside the records: one entry a cell, in running order."""
    content = {"argv": sys.argv, "cells": [planned.cell.flat() for planned in plan.cells]}
    OmegaConf.save(OmegaConf.create(content), plan.folder / "config.yaml")


def _refuse_illegal(cell: RunConfig) -> None:
    reason = refusal(cell)
    if reason is not None:
        raise ConfigError(reason)


def _refuse_failing_facts(cell: RunConfig) -> None:
    """Raises ConfigError where a package's facts fail: once cells run, nothing may end the sweep."""
    with STRATEGIES.asking(cell.strategy):
        answers: Mapping[str, Any] = {
            "refusals": "; ".join(STRATEGIES[cell.strategy].refusals(cell)),
            "exchange_bytes": STRATEGIES[cell.strategy].exchange_bytes(cell),
        }
        if not isinstance(answers["exchange_bytes"], int):
            raise TypeError(f"exchange_bytes must be a whole number, not {answers['exchange_bytes']!r}")
