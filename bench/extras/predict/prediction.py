"""What a cell will take on a device, before it runs: time and memory, each with its band."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bench.config import RunConfig
from bench.cost.band import Band, End, Fit, fit_of
from bench.cost.memory import MemoryNeed, allocated_band, memory_need, needed_band
from bench.extras.predict.hardware import Hardware
from bench.extras.predict.speeds import Speeds
from bench.extras.predict.time import StepParts, step_parts, step_work


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step of a cell, on the rank with most to do."""

    step_time_ms: Band
    parts: StepParts
    """Parts of the expected step."""
    peak_allocated_bytes: Band
    """Bytes of tensors at their peak."""
    needed_bytes: Band
    """Bytes of tensors, CUDA's context and what the allocator cannot use."""
    memory: MemoryNeed
    """The expected need, term by term."""
    usable_bytes: int | None
    """Bytes that one rank may take; None where they are not known."""

    @property
    def fit(self) -> Fit | None:
        """None where it is not known what a rank may take."""
        if self.usable_bytes is None:
            return None
        return fit_of(self.needed_bytes, self.usable_bytes)

    def to_json(self) -> dict[str, Any]:
        """The record's `analytic.prediction`."""
        return asdict(self) | {"fit": self.fit}


def predict(cell: RunConfig, hardware: Hardware, usable_bytes: int | None) -> Prediction | None:
    """The prediction for a legal cell; None where a strategy, engine or workload has no formula, or the
    hardware no rate of its kernel.
    """
    memory = memory_need(cell)
    work = None if memory is None or cell.data.packs else step_work(cell)
    if memory is None or work is None:
        return None
    if not Speeds(hardware, End.EXPECTED).knows(cell):
        return None
    ends = {end: step_parts(cell, work, Speeds(hardware, end)) for end in End}
    return Prediction(
        step_time_ms=Band.of(lambda end: ends[end].step_ms),
        parts=ends[End.EXPECTED],
        peak_allocated_bytes=allocated_band(cell, memory),
        needed_bytes=needed_band(cell, memory),
        memory=memory,
        usable_bytes=usable_bytes,
    )
