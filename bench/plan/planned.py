"""A cell's place in a sweep, and what the plan found out about it."""

from __future__ import annotations

from dataclasses import dataclass

from bench.common.environment import Machine
from bench.config import RunConfig
from bench.cost.memory import MemoryNeed, memory_need
from bench.plan.room import Room, room_of
from bench.record.record import Role
from bench.request.legality import refusal
from bench.strategies import STRATEGIES


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A cell of a sweep, when it runs, and what a plan knows of it before."""

    cell: RunConfig
    repeat: int
    """From 0, of `measure.repeats`."""
    order: int
    """Its place among all cells of the sweep, from 0."""
    role: Role = Role.CELL
    reason: str | None = None
    """Reason why the cell cannot run; None where it can."""
    need: MemoryNeed | None = None
    """Bytes that a rank needs; None where no formula is known, and of a cell that cannot run."""
    room: Room | None = None
    """Needed and usable memory of a rank; None where either is not known."""

    @property
    def folder_name(self) -> str:
        return f"{self.cell.cell_id}-{self.repeat}"


def planned_cell(cell: RunConfig, machine: Machine, role: Role = Role.CELL) -> PlannedCell:
    """Return the first process of a cell, with its refusal and its memory: both are asked here alone."""
    reason = refusal(cell)
    with STRATEGIES.plugin_errors_named(cell.strategy):
        need = memory_need(cell) if reason is None else None
    room = None if need is None else room_of(cell, need, machine)
    return PlannedCell(cell, repeat=0, order=0, role=role, reason=reason, need=need, room=room)
