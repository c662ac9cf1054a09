"""Predicted time and memory of a cell, with their bands, and the time of a step on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from bench.config import Cell
from bench.cost.band import Band, End, Fit, fit_of
from bench.cost.memory import MemoryNeed, allocated_band, memory_need, needed_band
from bench.extras.predict.cpu_speed import ProbeTask, ProbeTimes, probed, seconds_here
from bench.extras.predict.hardware_file import Hardware, another_cpu, hardware_of, has_rates
from bench.extras.predict.speeds import Speeds
from bench.extras.predict.time import PredictedParts, step_parts, step_work
from bench.plan.estimate import Expected
from bench.record.analytic import PredictedStep
from bench.request.modes import starts_ranks

PROBED = "attention and matrix products timed here just now"
OTHER_CPU = "the cost model at another CPU's rates"
CAVEAT = "that other CPU is an AMD EPYC; this one may take a multiple"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """One step of a cell, on the rank with most to do."""

    step_time_ms: Band
    parts: PredictedParts
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

    def stored(self) -> PredictedStep:
        """Return what the record's `analytic` holds."""
        return PredictedStep(
            step_time_ms=self.step_time_ms,
            parts=asdict(self.parts),
            peak_allocated_bytes=self.peak_allocated_bytes,
            needed_bytes=self.needed_bytes,
            memory=asdict(self.memory),
            usable_bytes=self.usable_bytes,
            fit=self.fit,
        )


def predict(cell: Cell, hardware: Hardware, usable_bytes: int | None) -> Prediction | None:
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


def timed_here(cells: Iterable[Cell]) -> Callable[[Cell], Expected | None]:
    """Return what says how long steps of these legal cells take, after timing this CPU for its cells."""
    times = probed(ProbeTask.of(cell) for cell in cells if _needs_probe(cell))
    return lambda cell: _as_probed(cell, times) or modelled(cell)


def _needs_probe(cell: Cell) -> bool:
    return starts_ranks(cell) and cell.cluster.device == "cpu"


def _as_probed(cell: Cell, times: dict[ProbeTask, ProbeTimes]) -> Expected | None:
    its = times.get(ProbeTask.of(cell))
    prediction = None if its is None else predict(cell, another_cpu(), None)
    if its is None or prediction is None:
        return None
    return Expected(seconds_here(cell, prediction.parts, another_cpu(), its), PROBED)


def modelled(cell: Cell) -> Expected | None:
    """Return what arithmetic expects of a step: by the file of a GPU, or on a CPU by another CPU's rates."""
    if cell.cluster.device == "cpu":
        expected = _predicted(cell, another_cpu(), OTHER_CPU, threads=cell.cluster.threads_per_rank)
        return expected and replace(expected, caveat=CAVEAT)
    if not has_rates(cell.hardware):
        return None
    return _predicted(cell, hardware_of(cell.hardware), f"the cost model on hardware={cell.hardware}")


def _predicted(cell: Cell, hardware: Hardware, basis: str, threads: int = 1) -> Expected | None:
    """Return the step's expected seconds; `hardware` is one of `threads` that share a rank's work."""
    prediction = predict(cell, hardware, None)
    return None if prediction is None else Expected(prediction.step_time_ms.expected / 1e3 / threads, basis)
