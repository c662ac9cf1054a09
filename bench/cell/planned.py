"""A cell's place in a sweep."""

from __future__ import annotations

from dataclasses import dataclass

from bench.config import RunConfig


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A cell's place in a sweep: `repeat` counts from 0, `order` is when it runs, `role` what it is for."""

    cell: RunConfig
    repeat: int
    order: int
    role: str = "cell"

    @property
    def folder_name(self) -> str:
        return f"{self.cell.cell_id}-{self.repeat}"
