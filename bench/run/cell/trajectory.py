"""Whether a cell trained as another cell of the same work did: loss and gradient norm, step by step.

A strategy that is right in the checked step and wrong in the next leaves the others' trajectory. So does one
that is right only at a short length, in another engine, or while somebody looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec

from bench.config import RunConfig
from bench.measure import checks
from bench.measure.losses.section import Losses
from bench.plan.work import MAX_COMPARED_STEPS, is_base, work_of
from bench.record.noise import Signals, first_departure, limit_for, moved_for
from bench.record.record import Record, Status
from bench.run.cell.outcome import found_wrong


class Trajectories:
    """The references of one sweep, by the work that they did."""

    def __init__(self) -> None:
        self._references: dict[str, tuple[RunConfig, Losses]] = {}

    def compare(self, cell: RunConfig, record: Record) -> Record:
        """Return the record with what it was compared with; a wrong result where it departed from that.

        The first sound cell of a work is compared with nothing, and is what the next are compared with. So is
        the first of `local`: it is not blamed for leaving a strategy that came before it.
        """
        losses = record.sections.get("losses")
        if record.status is not Status.OK or losses is None:
            return record
        reference = self._references.get(work_of(cell))
        objective = record.sections.get("objective")
        noise = {} if objective is None else objective.noise
        if reference is not None and not _replaces(cell, reference[0]):
            of, right = reference
            steps = min(len(losses.loss), len(right.loss), MAX_COMPARED_STEPS)
            limit = limit_for(cell.dtype, noise)
            losses = replace(losses, held_against=of.cell_id, held_steps=steps, held_within=asdict(limit))
            sections = {**record.sections, "losses": losses}
            record = replace(record, sections=sections, checks=checks(cell, sections))
            compared = Signals(losses.loss[:steps], losses.grad_norm[:steps])
            departure = first_departure(compared, right, limit, moved_for(cell.dtype, limit))
            if departure is not None:
                return found_wrong(record, f"{departure} of {of.strategy} on the same data")
        self._keep(cell, losses)
        return record

    def has_reference(self, work: str) -> bool:
        """Return whether there is a reference for this work."""
        return work in self._references

    def keep_finished(self, cells: Sequence[RunConfig], lines: Sequence[Mapping[str, Any]]) -> None:
        """Take references from the lines of a sweep that is resumed."""
        planned = {cell.cell_id: cell for cell in cells}
        for line in lines:
            if line["status"] == Status.OK and line.get("losses") and line["cell_id"] in planned:
                self._keep(planned[line["cell_id"]], msgspec.convert(line["losses"], Losses))

    def _keep(self, cell: RunConfig, losses: Losses) -> None:
        work = work_of(cell)
        before = self._references.get(work)
        if before is None or _replaces(cell, before[0]):
            self._references[work] = cell, losses


def _replaces(cell: RunConfig, reference: RunConfig) -> bool:
    """Whether others are better compared with this cell."""
    return is_base(cell) and not is_base(reference)
