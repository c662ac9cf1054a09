"""A cell of a plan with its place in the sweep, its refusal and the memory that it needs."""

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
class MemoryRoom:
    """Memory that one rank of a cell needs, and memory that it may use."""

    cell: Cell
    need: MemoryNeed
    usable: int
    """Bytes that the rank may use."""
    is_share: bool = False
    """Whether `usable` is the rank's equal share of the host's memory, because no limit is set."""

    @property
    def need_band(self) -> Band:
        """Bounds of the needed bytes."""
        return needed_band(self.cell, self.need)

    @property
    def needed_label(self) -> str:
        """Needed memory as text, such as `12.1-15.3 GiB` or `900.0 MiB-1.1 GiB`."""
        low, high = (size_label(round(size)) for size in (self.need_band.low, self.need_band.high))
        number, unit = low.split()
        return f"{number}-{high}" if high.endswith(unit) else f"{low}-{high}"

    @property
    def fit(self) -> Fit:
        """Whether the needed memory fits in the usable memory."""
        return fit_of(self.need_band, self.usable)

    @property
    def largest(self) -> str:
        """Name of the largest term of the need."""
        sizes = {field.name: getattr(self.need, field.name) for field in fields(MemoryNeed)}
        return max(sizes, key=lambda name: sizes[name])


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """Cell of a sweep with its place in the order, its refusal and its memory."""

    cell: Cell
    repeat: int
    """Number of this repeat, from 0."""
    order: int
    """Position among all cells of the sweep, from 0."""
    role: Role = Role.CELL
    reason: str | None = None
    """Reason why the cell cannot run; None for a legal cell."""
    need: MemoryNeed | None = None
    """Bytes that a rank needs; None without a formula, and for a cell that cannot run."""
    room: MemoryRoom | None = None
    """Needed and usable memory of a rank; None if one of them is unknown."""

    @property
    def folder_name(self) -> str:
        """Name of the folder of this run of the cell."""
        return f"{self.cell.cell_id}-{self.repeat}"


def planned_cell(cell: Cell, machine: Machine, role: Role = Role.CELL) -> PlannedCell:
    """Return repeat 0 of a cell, at position 0 of a sweep, with its refusal and its memory."""
    reason = refusal(cell)
    with STRATEGIES.name_plugin_in_errors(cell.strategy):
        need = memory_need(cell) if reason is None else None
    room = None if need is None else memory_room(cell, need, machine)
    return PlannedCell(cell, repeat=0, order=0, role=role, reason=reason, need=need, room=room)


def memory_room(cell: Cell, need: MemoryNeed, machine: Machine) -> MemoryRoom | None:
    """Return the memory that a rank of a legal cell needs and may use; None if the usable memory is unknown.

    CPU ranks without a limit share the memory of their hosts equally.
    """
    usable = usable_bytes(cell, machine)
    is_share = usable is None and cell.cluster.device == "cpu"
    if is_share:
        usable = machine.memory_bytes * cell.cluster.nodes // len(cell.running_ranks)
    return None if usable is None else MemoryRoom(cell, need, usable, is_share)
