"""Cells of `local` that others are compared with: the base of a default sweep, and references."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace

from bench.common.environment import Machine
from bench.common.labels import length_label, size_label
from bench.config import AUTO, Cell
from bench.cost.band import Fit
from bench.plan.planned import PlannedCell, planned_cell
from bench.plan.work import MAX_COMPARED_STEPS, REFERENCE_STRATEGY, is_base, work_of
from bench.record.record import Role
from bench.request.choices import Raw
from bench.request.placement import of_fewer_ranks
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.training.trainer_facts import NATIVE

STEPS_SHARE = 0.5
"""Of the budget, for steps; starting, checks and ending take the rest."""


def with_fitting_base(raws: Sequence[Raw], machine: Machine) -> tuple[list[Raw], str | None]:
    """Return the requests with `local` on all ranks where one rank may lack memory, and a line that says so.

    The base is the same at every length. Unchanged where one rank has room for each length, where more ranks
    give it no more room, and on CPUs.
    """
    bases = [raw for raw in raws if raw["strategy"]["name"] == REFERENCE_STRATEGY and raw["dp_shard"] == AUTO]
    if not any(_may_lack_memory(raw, machine) for raw in bases):
        return [*raws], None
    spread = [_spread(raw, _shards(raw, raws, machine)) for raw in bases]
    if spread == bases or all(_may_lack_memory(raw, machine) for raw in spread):
        return [*raws], None
    shards = ",".join(dict.fromkeys(str(raw["dp_shard"]) for raw in spread if raw["dp_shard"] != AUTO))
    line = (
        f"{REFERENCE_STRATEGY} runs with dp_shard={shards}, one sequence a rank, because one GPU may not hold"
        " the model at every length; dp_shard=1 runs it on one GPU. Its long steps are timed once and none is"
        " traced. The report shows its tokens/s, and no ratio to cells whose step has fewer sequences"
    )
    return [*(raw for raw in raws if raw not in bases), *spread], line


def _shards(base: Raw, raws: Sequence[Raw], machine: Machine) -> int:
    """Return the ranks that may share a base's model: those of the cells that differ in strategy alone."""
    asked = {key: value for key, value in base.items() if key != "strategy"}
    others = (raw for raw in raws if raw is not base and {**asked, "strategy": raw["strategy"]} == raw)
    cells = [cell for cell in (resolve(raw, machine) for raw in others) if cell.cluster.device == "cuda"]
    return max((cell.cluster.world_size // cell.dp_replicate for cell in cells), default=1)


def _spread(raw: Raw, shards: int) -> Raw:
    """Return the base sharded and measured shortly: its steps take longest, with a sequence for each rank."""
    if shards == 1:
        return raw
    least = raw["measure"]["min_timed_steps"]
    measure = {**raw["measure"], "min_timed_steps": 1 if least == AUTO else least, "trace": False}
    return {**raw, "dp_shard": shards, "measure": measure}


def _may_lack_memory(raw: Raw, machine: Machine) -> bool:
    room = planned_cell(resolve(raw, machine), machine).room
    return room is not None and room.fit is not Fit.FITS


def reference_cells(planned: Iterable[PlannedCell], machine: Machine) -> dict[str, PlannedCell]:
    """Return the cells of `local` that run in addition to these cells, by the work that they do.

    None for work that has a cell of `local` among these, for cells that cannot run, and where no cell may be
    a reference.
    """
    cells = {each.cell.cell_id: each for each in planned}.values()
    settled = {work_of(each.cell) for each in cells if is_base(each.cell)}
    found: dict[str, PlannedCell] = {}
    for each in cells:
        cell = each.cell
        is_wanted = cell.workload.trains and cell.measure.reference_budget_s > 0
        if not is_wanted or each.reason is not None or (work := work_of(cell)) in settled | found.keys():
            continue
        reference = reference_of(cell)
        asked = None if reference is None else planned_cell(reference, machine, Role.REFERENCE)
        if asked is not None and asked.reason is None:
            found[work] = asked
    return found


def why_not_tried(reference: PlannedCell) -> str | None:
    """Why a reference does not run, in a line: it would run out of memory. None where it may fit."""
    room = reference.room
    if room is None or room.fit is not Fit.OUT_OF_MEMORY:
        return None
    return (
        f"{length_label(reference.cell.seq_len)}: {REFERENCE_STRATEGY} does not run as a reference: a rank"
        f" needs {room.needed_label} and may use {size_label(room.usable)}; others are compared with the"
        " first sound cell"
    )


def reference_of(cell: Cell) -> Cell | None:
    """The native loop's cell of `local` that does the same work on one rank a sequence; None where none does.

    It may be refused. Its time is not reported, so its budget alone limits its steps.
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
            min_timed_steps=0,
            budget_s=STEPS_SHARE * cell.measure.reference_budget_s,
            timeout_s=min(cell.measure.timeout_s, cell.measure.reference_budget_s),
            trace=False,
            keep_traces=False,
        ),
    )
    return reference if work_of(reference) == work_of(cell) else None
