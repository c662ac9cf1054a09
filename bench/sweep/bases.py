"""The base that the other strategies of a default sweep are compared with."""

from __future__ import annotations

from collections.abc import Sequence

from bench.cell.trajectory import REFERENCE_STRATEGY
from bench.config import AUTO, RunConfig
from bench.cost.fit import Fit
from bench.environment import Machine
from bench.request.choices import Raw
from bench.request.resolve import resolve
from bench.sweep.room import room_of

SHORT = {"least_steps": 1, "trace": False}
"""Measurement of such a base, whose steps have one sequence for each rank and take longest."""


def with_fitting_base(raws: Sequence[Raw], machine: Machine) -> tuple[list[Raw], str | None]:
    """Return the requests with `local` on all ranks where one rank may lack memory, and a line that says so.

    The base is the same at every length. Unchanged where one rank has room for each length, where no number
    of ranks gives it more room, and on CPUs.
    """
    bases = [raw for raw in raws if raw["strategy"]["name"] == REFERENCE_STRATEGY and raw["dp_shard"] == AUTO]
    shared = [resolve(raw, machine) for raw in raws if raw not in bases]
    ranks = max((cell.cluster.world_size for cell in shared if cell.cluster.device == "cuda"), default=1)
    if not bases or ranks == 1 or all(_fits(resolve(raw, machine), machine) for raw in bases):
        return [*raws], None
    spread = [{**raw, "dp_shard": ranks, "measure": {**raw["measure"], **SHORT}} for raw in bases]
    if not any(_fits(resolve(raw, machine), machine) for raw in spread):
        return [*raws], None
    line = (
        f"{REFERENCE_STRATEGY} runs with dp_shard={ranks}, one sequence a rank, because one GPU may not hold"
        " the model at every length; it is timed once where a step is long, and not traced; dp_shard=1 runs"
        " it on one GPU"
    )
    return [*(raw for raw in raws if raw not in bases), *spread], line


def _fits(cell: RunConfig, machine: Machine) -> bool:
    room = room_of(cell, machine)
    return room is not None and room.fit is Fit.FITS
