"""Whether a rank of a cell has the memory that it needs, before it runs."""

from __future__ import annotations

from dataclasses import dataclass, fields

from bench.common.environment import Machine
from bench.common.labels import size_label
from bench.config import RunConfig
from bench.cost.band import Band, Fit, fit_of
from bench.cost.memory import MemoryNeed, needed_band
from bench.request.hardware import usable_bytes


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


def room_of(cell: RunConfig, need: MemoryNeed, machine: Machine) -> Room | None:
    """Return the needed and usable memory of one rank of a legal cell; None where the usable is not known.

    CPU ranks without a limit share what memory the host has.
    """
    usable = usable_bytes(cell, machine)
    is_share = usable is None and cell.cluster.device == "cpu"
    if is_share:
        usable = machine.memory_bytes * cell.cluster.nodes // len(cell.running_ranks)
    return None if usable is None else Room(cell, need, usable, is_share)
