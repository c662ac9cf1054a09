"""What a resumed sweep goes on with: the plan and the records that its folder holds already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from bench.common.environment import departures, describe
from bench.config import ConfigError, Resume, RunConfig
from bench.plan.cell_labels import CellLabels
from bench.plan.plan import Plan
from bench.record.record import Provenance, Status, is_finding
from bench.request.modes import PREDICT
from bench.request.packages import used_packages
from bench.strategies import STRATEGIES

MOST_NAMED = 2
"""Cells that a message names; more are counted."""
BECOME: Mapping[Resume, str] = {
    Resume.NEVER: "those cells run again",
    Resume.MATCHING: "those cells run again; resume=any keeps them",
    Resume.ANY: "kept, as resume=any asks",
}


class Resumed:
    """The cells of a plan next to those of the sweep in its folder, by their ids.

    Raises ConfigError where the folder's sweep has none of these cells.
    """

    def __init__(self, plan: Plan) -> None:
        stored = plan.stored.cells
        planned = [each.cell for each in plan.cells]
        self._labels = CellLabels([*stored, *planned])
        ours, theirs = ({cell.cell_id: cell for cell in cells} for cells in (planned, stored))
        self._left_out = [cell for name, cell in theirs.items() if name not in ours]
        self._added = [cell for name, cell in ours.items() if name not in theirs] if stored else []
        self._grows = plan.grow is not None
        if stored and len(self._left_out) == len(theirs):
            raise ConfigError(
                f"sweep_dir={plan.folder}: holds another sweep. Only there: {self._named(self._left_out)};"
                f" only in this request: {self._named(self._added)}. To go on with the folder's own"
                " plan, add no word but resume=true; else name another folder"
            )

    @property
    def is_whole(self) -> bool:
        """Whether all cells of the sweep are planned again."""
        return not self._left_out

    @property
    def lines(self) -> list[str]:
        """What the request leaves out and adds; nothing for a search, whose cells come one by one."""
        if self._grows:
            return []
        told = {
            "only in the folder's earlier sweep, not run again": self._left_out,
            "new to the folder": self._added,
        }
        return [f"{self._named(cells)}: {what}" for what, cells in told.items() if cells]

    def _named(self, cells: Sequence[RunConfig]) -> str:
        count = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
        more = ", ..." if len(cells) > MOST_NAMED else ""
        return f"{count} ({', '.join(map(self._labels.of, cells[:MOST_NAMED]))}{more})"


@dataclass(frozen=True, slots=True)
class Kept:
    """What of a folder's records counts."""

    records: Sequence[dict[str, Any]]
    """At most one of each cell and repeat, in the order of the file."""
    lines: tuple[str, ...]
    """How many final ones were made with something else, by what that is, and what becomes of them."""


def kept_records(plan: Plan, records: Iterable[dict[str, Any]]) -> Kept:
    """What counts for this plan. A line that is not kept stays in the file, as evidence.

    Of a cell that ran again the newest line counts, here as in every analysis. A synthetic one never does.
    """
    newest = {
        (record["cell_id"], record["repeat"]): record
        for record in records
        if record.get("provenance") != Provenance.SYNTHETIC
    }
    cells = {planned.cell.cell_id: planned.cell for planned in plan.cells}
    if not newest:
        return Kept([], ())
    here = cache(lambda strategy: describe(STRATEGIES.packages(strategy)))
    kept, departed = [], Counter[str]()
    for record in newest.values():
        cell = cells.get(record["cell_id"])
        strategy = str(record["config"].get("strategy")) if cell is None else cell.strategy
        departed_in = _departures(cell, record, here(strategy))
        if not departed_in or plan.resume is Resume.ANY:
            kept.append(record)
        if departed_in and is_finding(record["role"], Status(record["status"])):
            departed[" and ".join(departed_in)] += 1
    lines = (
        f"{count} {'record' if count == 1 else 'records'} of {words}: {BECOME[plan.resume]}"
        for words, count in departed.items()
    )
    return Kept(kept, tuple(lines))


def _departures(cell: RunConfig | None, record: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """In what the record's origin is not the one that the cell would have now.

    Of a cell that a plan has not come to yet it is not known which packages it would use.
    """
    packages = frozenset[str]() if cell is None else used_packages(cell)
    is_predicted = record["config"].get("mode") == PREDICT if cell is None else cell.mode == PREDICT
    return departures(record.get("environment") or {}, here, None if is_predicted else packages)
