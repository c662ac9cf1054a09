"""A cell's place in a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from bench.config import RunConfig
from bench.record import Role


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A cell of a sweep, and when it runs."""

    cell: RunConfig
    repeat: int
    """From 0, of `measure.repeats`."""
    order: int
    """Its place among all cells of the sweep, from 0."""
    role: Role = Role.CELL

    @property
    def folder_name(self) -> str:
        return f"{self.cell.cell_id}-{self.repeat}"
