"""Which records of a folder a resumed sweep keeps: the newest of each cell and repeat, of one origin."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench.config import Resume, RunConfig
from bench.environment import Departure, Origin, describe
from bench.record import Status, is_finding
from bench.request.legality import used_packages
from bench.request.target import PREDICT
from bench.strategies import STRATEGIES
from bench.sweep.plan import Plan

BECOME: Mapping[Resume, str] = {
    Resume.NEVER: "those cells run again",
    Resume.MATCHING: "those cells run again; resume=any keeps them",
    Resume.ANY: "kept, as resume=any asks",
}


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a folder's records counts."""

    records: Sequence[dict[str, Any]]
    """At most one of each cell and repeat, in the order of the file."""
    lines: tuple[str, ...]
    """How many final ones were made with something else, by what that is, and what becomes of them."""


def kept_records(plan: Plan, records: Iterable[dict[str, Any]]) -> Kept:
    """What counts for this plan. A line that is not kept stays in the file, as evidence.

    Of a cell that ran again the newest line counts, here as in every analysis.
    """
    newest = {(record["cell_id"], record["repeat"]): record for record in records}
    cells = {planned.cell.cell_id: planned.cell for planned in plan.cells}
    if not newest:
        return Kept([], ())
    here = cache(lambda strategy: Origin.of(describe(STRATEGIES.packages(strategy))))
    kept, departed = [], Counter[str]()
    for record in newest.values():
        cell = cells.get(record["cell_id"])
        strategy = str(record["config"].get("strategy")) if cell is None else cell.strategy
        departures = _departures(cell, record, here(strategy))
        if not departures or plan.resume is Resume.ANY:
            kept.append(record)
        if departures and is_finding(record["role"], Status(record["status"])):
            departed[" and ".join(each.words for each in departures)] += 1
    lines = (
        f"{count} {'record' if count == 1 else 'records'} of {words}: {BECOME[plan.resume]}"
        for words, count in departed.items()
    )
    return Kept(kept, tuple(lines))


def _departures(cell: RunConfig | None, record: Mapping[str, Any], here: Origin) -> list[Departure]:
    """In what the record's origin is not the one that the cell would have now.

    Of a cell that a plan has not come to yet it is not known which packages it would use.
    """
    if cell is None:
        packages = None if record["config"].get("mode") == PREDICT else frozenset[str]()
    else:
        packages = None if cell.mode == PREDICT else used_packages(cell)
    return Origin.of(record.get("environment") or {}).departures(here, packages)
