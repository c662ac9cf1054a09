"""What a cell will take on a device, before it runs: time and memory, each with its band."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from bench.config import RunConfig
from bench.cost.band import Band, End
from bench.cost.hardware import Hardware
from bench.cost.memory import MemoryNeed, memory_need
from bench.cost.speeds import DatasheetSpeeds
from bench.cost.time import StepParts, step_parts
from bench.strategies import STRATEGIES


class Fit(StrEnum):
    """Whether what a rank needs is what it has."""

    FITS = "fits"
    UNDECIDED = "undecided"
    """What it has lies within the band of what it needs."""
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step of a cell, on the rank with most to do."""

    step_time_ms: Band
    parts: StepParts
    """Of the expected step."""
    peak_allocated_bytes: Band
    """Of tensors alone."""
    needed_bytes: Band
    """With what the process takes beside tensors."""
    memory: MemoryNeed
    """The expected need, term by term."""
    usable_bytes: int | None
    """What one rank may take; None where nothing says it."""

    @property
    def fit(self) -> Fit | None:
        """None where it is not known what a rank may take."""
        if self.usable_bytes is None:
            return None
        if self.needed_bytes.high <= self.usable_bytes:
            return Fit.FITS
        return Fit.UNDECIDED if self.needed_bytes.low <= self.usable_bytes else Fit.OUT_OF_MEMORY

    def to_json(self) -> dict[str, Any]:
        """The record's `analytic.prediction`."""
        return asdict(self) | {"fit": self.fit}


def predict(cell: RunConfig, hardware: Hardware, usable_bytes: int | None) -> Prediction | None:
    """The prediction for a legal cell; None where a strategy, engine or workload has no formula."""
    facts = STRATEGIES.get(cell.strategy)
    schedule = None if facts is None else facts.schedule(cell)
    memory = memory_need(cell)
    if schedule is None or memory is None or cell.data.packs:
        return None
    ends = {end: step_parts(cell, schedule, DatasheetSpeeds(hardware, end)) for end in End}
    allocated = memory.total - memory.context
    return Prediction(
        step_time_ms=Band.of(lambda end: ends[end].step_ms),
        parts=ends[End.EXPECTED],
        peak_allocated_bytes=Band(allocated, allocated, allocated),
        needed_bytes=Band(memory.total, memory.total, memory.total),
        memory=memory,
        usable_bytes=usable_bytes,
    )
