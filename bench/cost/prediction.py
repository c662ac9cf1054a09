"""What a cell will take on a device, before it runs: time and memory, each with its band."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from bench.config import RunConfig
from bench.cost.band import Band, End, Fit, fit_of
from bench.cost.engine_memory import ENGINE_MEMORY
from bench.cost.hardware import Hardware
from bench.cost.memory import MemoryNeed, memory_need
from bench.cost.speeds import Speeds
from bench.cost.time import StepParts, step_parts, step_work
from bench.labels import GIB

FORMULA_SHARE = 0.03
"""Of tensors: nine in ten of the measured peaks of CPU ranks in results/reference/ are as near to the formula
(docs/published_memory.md)."""
CONTEXT_GIB = (0.5, 2.5)
"""CUDA's context and libraries take 0.5 to 0.7 GiB by public out-of-memory messages; NCCL's buffers, for each
group of ranks that share a channel, are not measured by us: 2 GiB are left for them."""
FRAGMENTATION_SHARE = 0.15
"""Of tensors: what the caching allocator holds and cannot use, on average over eight models that are trained
with recomputation, sharding and offloading (GMLake, arXiv:2401.08156); none of it with luck."""


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


def allocated_band(cell: RunConfig, need: MemoryNeed) -> Band:
    """Bytes of tensors at the fullest moment, and how far they may be from the formula.

    Both ends are what a rank needs if all that is not known turns out well, or badly, at once.
    """
    expected = need.allocated
    engine = ENGINE_MEMORY[cell.engine.name](cell)
    spread = round(FORMULA_SHARE * expected)
    return Band(expected - spread - engine.spare, expected, expected + spread + engine.beyond)


def needed_band(cell: RunConfig, need: MemoryNeed) -> Band:
    """Bytes that a rank needs: tensors, what the process takes beside them, what its allocator cannot use."""
    allocated = allocated_band(cell, need)
    if cell.cluster.device != "cuda":
        return allocated
    least, most = (round(gib * GIB) for gib in CONTEXT_GIB)
    high = round(allocated.high * (1 + FRAGMENTATION_SHARE)) + most
    return Band(allocated.low + least, need.total, high)
