"""A cell's place in a sweep, and what the plan found out about it."""

from __future__ import annotations

from dataclasses import dataclass

from bench.cell.room import Room, room_of
from bench.config import RunConfig
from bench.environment import Machine
from bench.record import Role
from bench.request.legality import refusal


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
    """Why it cannot run; None where it can."""
    room: Room | None = None
    """Memory that a rank needs and may use; None where either is not known."""

    @property
    def folder_name(self) -> str:
        return f"{self.cell.cell_id}-{self.repeat}"


def planned_cell(cell: RunConfig, machine: Machine, role: Role = Role.CELL) -> PlannedCell:
    """Return the first process of a cell, with its refusal and its memory: both are asked here alone."""
    reason = refusal(cell)
    room = None if reason is not None else room_of(cell, machine)
    return PlannedCell(cell, repeat=0, order=0, role=role, reason=reason, room=room)
