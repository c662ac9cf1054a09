"""A cell's place in a sweep, and what the plan found out about it: its refusal and its memory."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bench.common.environment import Machine
from bench.common.labels import size_label
from bench.config import Cell
from bench.cost.band import Band, Fit, fit_of
from bench.cost.memory import MemoryNeed, memory_need, needed_band
from bench.record.record import Role
from bench.request.hardware import usable_bytes
from bench.request.legality import refusal
from bench.strategies import STRATEGIES


@dataclass(frozen=True, slots=True)
class Room:
    """Memory that one rank of a cell needs, and memory that it may use."""

    cell: Cell
    need: MemoryNeed
    usable: int
    is_share: bool = False
    """Whether nothing limits the rank but what the host's memory leaves to each."""

    @property
    def needed(self) -> Band:
        return needed_band(self.cell, self.need)

    @property
    def needed_label(self) -> str:
        """`12.1-15.3 GiB`, or `900.0 MiB-1.1 GiB`."""
        low, high = (size_label(round(size)) for size in (self.needed.low, self.needed.high))
        number, unit = low.split()
        return f"{number}-{high}" if high.endswith(unit) else f"{low}-{high}"

    @property
    def fit(self) -> Fit:
        return fit_of(self.needed, self.usable)

    @property
    def largest(self) -> str:
        """The term that needs most."""
        sizes = {field.name: getattr(self.need, field.name) for field in fields(MemoryNeed)}
        return max(sizes, key=lambda name: sizes[name])


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """A cell of a sweep, when it runs, and what a plan knows of it before."""

    cell: Cell
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


def planned_cell(cell: Cell, machine: Machine, role: Role = Role.CELL) -> PlannedCell:
    """Return the first process of a cell, with its refusal and its memory: both are asked here alone."""
    reason = refusal(cell)
    with STRATEGIES.plugin_errors_named(cell.strategy):
        need = memory_need(cell) if reason is None else None
    room = None if need is None else room_of(cell, need, machine)
    return PlannedCell(cell, repeat=0, order=0, role=role, reason=reason, need=need, room=room)


def room_of(cell: Cell, need: MemoryNeed, machine: Machine) -> Room | None:
    """Return the needed and usable memory of one rank of a legal cell; None where the usable is not known.

    CPU ranks without a limit share what memory the host has.
    """
    usable = usable_bytes(cell, machine)
    is_share = usable is None and cell.cluster.device == "cpu"
    if is_share:
        usable = machine.memory_bytes * cell.cluster.nodes // len(cell.running_ranks)
    return None if usable is None else Room(cell, need, usable, is_share)
