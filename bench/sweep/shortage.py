"""Which cells of a plan need more memory than a rank may use: a warning, as running out is a finding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from bench.cell.run import RUNS
from bench.config import RunConfig
from bench.cost.band import Band
from bench.cost.fit import Fit, fit_of
from bench.cost.memory import MemoryNeed, memory_need
from bench.cost.memory_band import needed_band
from bench.environment import Machine
from bench.labels import length_label, size_label
from bench.request.hardware import usable_bytes
from bench.request.legality import refusal

MOST_NAMED = 12
"""Cells that are named one by one; more are counted."""

SHARED = " of this host's memory; with cluster.memory_limit_gib=... the rank is ended before the host suffers"
HEADS: Mapping[Fit, str] = {
    Fit.OUT_OF_MEMORY: (
        "estimated to run out of memory, and tried all the same: where that happens is a result"
    ),
    Fit.UNDECIDED: (
        "undecided by the estimate, and tried: the low end of what they need fits, the high end does not"
    ),
}
"""What is said of cells that do not surely fit."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one rank of a cell needs, and what it may use."""

    cell: RunConfig
    need: MemoryNeed
    usable: int
    is_share: bool = False
    """Whether nothing limits the rank but what the host's memory leaves to each."""

    @property
    def needed(self) -> Band:
        return needed_band(self.cell, self.need)

    @property
    def fit(self) -> Fit:
        return fit_of(self.needed, self.usable)

    @property
    def largest(self) -> str:
        """The term that needs most."""
        sizes = {field.name: getattr(self.need, field.name) for field in fields(MemoryNeed)}
        return max(sizes, key=lambda name: sizes[name])

    @property
    def checkpointed(self) -> MemoryNeed | None:
        """What the cell would need with checkpointing, where that may fit."""
        if self.cell.checkpointing:
            return None
        cell = replace(self.cell, checkpointing=True)
        need = memory_need(cell)
        is_less = need is not None and fit_of(needed_band(cell, need), self.usable) is not Fit.OUT_OF_MEMORY
        return need if is_less else None


def shortages(cells: Iterable[RunConfig], machine: Machine) -> list[Room]:
    """The legal cells that may need more than one of their ranks may use, where both are known.

    Of those that will run: a prediction's record says by itself that there is no room.
    """
    rooms = (room_of(cell, machine) for cell in cells if cell.mode in RUNS)
    return [room for room in rooms if room is not None and room.fit is not Fit.FITS]


def room_of(cell: RunConfig, machine: Machine) -> Room | None:
    """What one rank of a legal cell needs and has; None where either is not known.

    CPU ranks without a limit share what memory the host has.
    """
    if refusal(cell) is not None:
        return None
    usable, need = usable_bytes(cell, machine), memory_need(cell)
    is_share = usable is None and cell.cluster.device == "cpu"
    if is_share:
        usable = machine.memory_bytes // cell.cluster.ranks_per_node
    return None if usable is None or need is None else Room(cell, need, usable, is_share)


def shortage_lines(cells: Iterable[RunConfig], machine: Machine) -> list[str]:
    """What a person should know of them before the first cell; nothing where every cell should fit."""
    found = shortages(cells, machine)
    return [line for fit, said in HEADS.items() for line in _said([s for s in found if s.fit is fit], said)]


def _said(found: Sequence[Room], said: str) -> list[str]:
    if not found:
        return []
    count = "1 cell is" if len(found) == 1 else f"{len(found)} cells are"
    lines = [f"{count} {said}", *(f"  {_line(each)}" for each in found[:MOST_NAMED])]
    if len(found) > MOST_NAMED:
        lines.append(f"  and {len(found) - MOST_NAMED} more")
    return lines


def _line(short: Room) -> str:
    cell = short.cell
    ranks = f" on {cell.cluster.world_size} ranks" if cell.cluster.world_size > 1 else ""
    low, high = (size_label(round(size)) for size in (short.needed.low, short.needed.high))
    line = (
        f"{cell.strategy} {length_label(cell.seq_len)}{ranks}, checkpointing"
        f" {'on' if cell.checkpointing else 'off'}: needs about {size_label(short.need.total)}"
        f" ({low} to {high}), mostly {short.largest}, and has {size_label(short.usable)} per rank"
        f"{SHARED if short.is_share else ''}"
    )
    instead = short.checkpointed
    return line if instead is None else f"{line}; about {size_label(instead.total)} with checkpointing=true"
