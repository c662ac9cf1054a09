"""Cells of `local` that other cells are compared with: the base of a default sweep, and references.

The base is a cell of the sweep, and its speed is compared. A reference runs in addition, for its losses only.
"""

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
from bench.request import values
from bench.request.choices import Raw
from bench.request.placement import shrink_cluster
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.training.trainer_facts import NATIVE

STEPS_SHARE = 0.5
"""Share of a reference's budget for steps; start, checks and end take the rest."""


def with_fitting_base(requests: Sequence[Raw], machine: Machine) -> tuple[list[Raw], str | None]:
    """Return the requests, with `local` sharded if one rank may lack memory, and a note for the user.

    If one length needs it, `local` is sharded at every length, and such cells run one timed step. The
    requests are unchanged, and the note is None, if one rank has enough memory for every length, if more
    ranks do not help, and on CPUs.
    """
    local = [request for request in requests if request["strategy"]["name"] == REFERENCE_STRATEGY]
    bases = [request for request in local if request["dp_shard"] == AUTO]
    if not any(_may_lack_memory(base, machine) for base in bases):
        return [*requests], None
    sharded = [_shard_base(base, _base_shards(base, requests, machine)) for base in bases]
    if sharded == bases or all(_may_lack_memory(base, machine) for base in sharded):
        return [*requests], None
    shards = ",".join(dict.fromkeys(str(base["dp_shard"]) for base in sharded if base["dp_shard"] != AUTO))
    line = (
        f"{REFERENCE_STRATEGY} runs with dp_shard={shards}, one sequence per rank, because one GPU may not"
        " have enough memory at every length; dp_shard=1 runs it on one GPU. Its long steps are timed once"
        " and not traced. The report shows its tokens/s, but no ratio to cells with fewer sequences per step"
    )
    return [*(request for request in requests if request not in bases), *sharded], line


def _base_shards(base: Raw, requests: Sequence[Raw], machine: Machine) -> int:
    """Return the number of GPU ranks over which a base may be sharded; 1 if there are none.

    It is the largest number that a cell uses for one replica, among cells that differ from the base only in
    strategy.
    """
    others = (request for request in requests if request is not base)
    cells = [resolve(other, machine) for other in others if {**base, "strategy": other["strategy"]} == other]
    on_gpus = [cell for cell in cells if cell.cluster.device == "cuda"]
    replicas = values.whole_number("dp_replicate", base["dp_replicate"])  # resolved cells may have none
    return max((cell.cluster.world_size // replicas for cell in on_gpus), default=1)


def _shard_base(base: Raw, shards: int) -> Raw:
    """Return the request for the base with `dp_shard=shards`, one timed step and no traced step.

    Its steps are the longest of the sweep, so few are measured. With one shard the request is unchanged.
    """
    if shards == 1:
        return base
    min_timed_steps = base["measure"]["min_timed_steps"]
    short_measure = {"min_timed_steps": 1 if min_timed_steps == AUTO else min_timed_steps, "trace": False}
    return {**base, "dp_shard": shards, "measure": {**base["measure"], **short_measure}}


def _may_lack_memory(request: Raw, machine: Machine) -> bool:
    room = planned_cell(resolve(request, machine), machine).room
    return room is not None and room.fit is not Fit.FITS


def reference_cells(planned: Iterable[PlannedCell], machine: Machine) -> dict[str, PlannedCell]:
    """Return the references that run in addition to the planned cells, by their work (`work_of`).

    No reference runs for a work if the plan includes its base, if none of its cells trains, is legal and has
    a budget for a reference, or if the reference would be illegal.
    """
    cells = {entry.cell.cell_id: entry for entry in planned}.values()
    work_with_base = {work_of(entry.cell) for entry in cells if is_base(entry.cell)}
    references: dict[str, PlannedCell] = {}
    for entry in cells:
        cell = entry.cell
        is_wanted = cell.workload.trains and cell.measure.reference_budget_s > 0 and entry.reason is None
        if not is_wanted or (work := work_of(cell)) in work_with_base | references.keys():
            continue
        if (reference := reference_of(cell)) is not None:
            planned_reference = planned_cell(reference, machine, Role.REFERENCE)
            if planned_reference.reason is None:
                references[work] = planned_reference
    return references


def reason_to_skip(reference: PlannedCell) -> str | None:
    """Return a line that says that a reference would run out of memory; None if it may fit."""
    room = reference.room
    if room is None or room.fit is not Fit.OUT_OF_MEMORY:
        return None
    return (
        f"{length_label(reference.cell.seq_len)}: {REFERENCE_STRATEGY} does not run as a reference, because a"
        f" rank needs {room.needed_label} and may use {size_label(room.usable)}; losses are compared with"
        " those of the first sound cell"
    )


def reference_of(cell: Cell) -> Cell | None:
    """Return the reference of a cell: `local` with one rank per sequence, in the native trainer.

    None if `local` cannot do the work of the cell (`work_of`). The reference may be illegal. Only its budget
    limits the number of its steps, since its time is not reported.
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
        cluster=replace(shrink_cluster(cell.cluster, cell.dp_degree), threads_per_rank=threads),
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
