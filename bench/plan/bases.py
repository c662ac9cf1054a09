"""The base that the other strategies of a default sweep are shown with."""

from __future__ import annotations

from collections.abc import Sequence

from bench.common.environment import Machine
from bench.config import AUTO
from bench.cost.band import Fit
from bench.plan.planned import planned_cell
from bench.plan.work import REFERENCE_STRATEGY
from bench.request.choices import Raw
from bench.request.resolve import resolve


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
    least = raw["measure"]["least_steps"]
    measure = {**raw["measure"], "least_steps": 1 if least == AUTO else least, "trace": False}
    return {**raw, "dp_shard": shards, "measure": measure}


def _may_lack_memory(raw: Raw, machine: Machine) -> bool:
    room = planned_cell(resolve(raw, machine), machine).room
    return room is not None and room.fit is not Fit.FITS
