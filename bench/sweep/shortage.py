"""Which cells of a plan need more memory than a rank may use: a warning, as running out is a finding."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from bench.cell.run import RUNS
from bench.config import RunConfig
from bench.cost.memory import MemoryNeed, memory_need
from bench.environment import Machine
from bench.labels import length_label, size_label
from bench.request.hardware import usable_bytes
from bench.request.legality import refusal

MOST_NAMED = 12
"""Cells that are named one by one; more are counted."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """A cell that is estimated to run out of memory."""

    cell: RunConfig
    need: MemoryNeed
    usable: int

    @property
    def largest(self) -> str:
        """The term that needs most."""
        sizes = {field.name: getattr(self.need, field.name) for field in fields(MemoryNeed)}
        return max(sizes, key=lambda name: sizes[name])

    @property
    def checkpointed(self) -> MemoryNeed | None:
        """What the cell would need with checkpointing, where that would fit."""
        need = None if self.cell.checkpointing else memory_need(replace(self.cell, checkpointing=True))
        return need if need is not None and need.total <= self.usable else None


def shortages(cells: Iterable[RunConfig], machine: Machine) -> list[Shortage]:
    """The legal cells whose estimate is above what one of their ranks may use, where both are known.

    Of those that will run: a prediction's record says by itself that there is no room.
    """
    found = []
    for cell in (cell for cell in cells if cell.mode in RUNS):
        usable, need = usable_bytes(cell, machine), memory_need(cell)
        if usable is not None and need is not None and need.total > usable and refusal(cell) is None:
            found.append(Shortage(cell, need, usable))
    return found


def shortage_lines(cells: Iterable[RunConfig], machine: Machine) -> list[str]:
    """What a person should know of them before the first cell; nothing where every cell should fit."""
    found = shortages(cells, machine)
    if not found:
        return []
    count = "1 cell is" if len(found) == 1 else f"{len(found)} cells are"
    lines = [
        f"{count} estimated to run out of memory, and tried all the same: where that happens is a result"
    ]
    lines += [f"  {_line(each)}" for each in found[:MOST_NAMED]]
    if len(found) > MOST_NAMED:
        lines.append(f"  and {len(found) - MOST_NAMED} more")
    return lines


def _line(short: Shortage) -> str:
    cell = short.cell
    ranks = f" on {cell.cluster.world_size} ranks" if cell.cluster.world_size > 1 else ""
    line = (
        f"{cell.strategy} {length_label(cell.seq_len)}{ranks}, checkpointing"
        f" {'on' if cell.checkpointing else 'off'}: needs about {size_label(short.need.total)}, mostly"
        f" {short.largest}, and has {size_label(short.usable)} per rank"
    )
    instead = short.checkpointed
    return line if instead is None else f"{line}; {size_label(instead.total)} with checkpointing=true"
