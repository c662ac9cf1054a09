"""Predicted time and memory of a cell with their bands, and expected step times for a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace

from bench.config import Cell
from bench.cost.band import Band, BandEnd, Fit, fit_of
from bench.cost.memory import MemoryNeed, allocated_band, memory_need, needed_band
from bench.extras.predict.cpu_speed import ProbeTask, ProbeTimes, run_probe, step_s_on_this_cpu
from bench.extras.predict.hardware_file import Hardware, another_cpu, hardware_of, has_rates
from bench.extras.predict.speeds import Speeds
from bench.extras.predict.time import PredictedParts, step_parts, step_work
from bench.plan.estimate import ExpectedStep
from bench.record.analytic import PredictedStep
from bench.request.modes import starts_ranks

PROBED = "a short timing of attention and matrix products on this CPU"
OTHER_CPU = "the cost model at another CPU's rates"
CAVEAT = "the other CPU is an AMD EPYC; this CPU may take several times as long"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Prediction of one step of a cell, on the rank with the largest workload."""

    step_time_ms: Band
    parts: PredictedParts
    """Parts of the expected step."""
    peak_allocated_bytes: Band
    """Peak bytes of tensors."""
    needed_bytes: Band
    """Bytes of tensors and CUDA's context, and bytes that the allocator reserves but cannot use."""
    memory: MemoryNeed
    """The expected need, term by term."""
    usable_bytes: int | None
    """Bytes that one rank may use; None if unknown."""

    @property
    def fit(self) -> Fit | None:
        """Comparison of needed and usable memory; None if usable memory is unknown."""
        if self.usable_bytes is None:
            return None
        return fit_of(self.needed_bytes, self.usable_bytes)

    def as_record(self) -> PredictedStep:
        """Return the fields of this prediction that a record stores."""
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
    """Return the prediction for a legal cell.

    Args:
        cell: Cell to predict.
        hardware: Rates of its device.
        usable_bytes: Bytes that one rank may use; None if unknown.

    Returns:
        None if strategy, engine, workload or packing has no formula, or the hardware no rate of the kernel.
    """
    memory = memory_need(cell)
    work = None if memory is None or cell.data.packs else step_work(cell)
    if memory is None or work is None:
        return None
    if not Speeds(hardware, BandEnd.EXPECTED).has_rates_of(cell):
        return None
    parts_by_end = {end: step_parts(cell, work, Speeds(hardware, end)) for end in BandEnd}
    return Prediction(
        step_time_ms=Band.from_function(lambda end: parts_by_end[end].step_ms),
        parts=parts_by_end[BandEnd.EXPECTED],
        peak_allocated_bytes=allocated_band(cell, memory),
        needed_bytes=needed_band(cell, memory),
        memory=memory,
        usable_bytes=usable_bytes,
    )


def expected_after_probe(cells: Iterable[Cell]) -> Callable[[Cell], ExpectedStep | None]:
    """Probe this CPU, and return a function that gives the expected step time of a legal cell.

    For a cell without a probe the function gives the time by the cost model, or None.

    Args:
        cells: Legal cells of the plan; the probe runs for those with CPU ranks.
    """
    on_cpu = (cell for cell in cells if starts_ranks(cell) and cell.cluster.device == "cpu")
    times = run_probe(ProbeTask.for_cell(cell) for cell in on_cpu)
    return lambda cell: _from_probe(cell, times) or expected_by_cost_model(cell)


def _from_probe(cell: Cell, times: dict[ProbeTask, ProbeTimes]) -> ExpectedStep | None:
    """Return the expected step time by the probe; None without a time of the cell's task or a prediction."""
    task_times = times.get(ProbeTask.for_cell(cell))
    prediction = None if task_times is None else predict(cell, another_cpu(), None)
    if task_times is None or prediction is None:
        return None
    return ExpectedStep(step_s_on_this_cpu(cell, prediction.parts, another_cpu(), task_times), PROBED)


def expected_by_cost_model(cell: Cell) -> ExpectedStep | None:
    """Return the expected step time by the cost model; None if there is no formula or no rate.

    For GPU ranks the rates are those of the GPU's file. For CPU ranks they are another CPU's, as the result's
    `caveat` says.
    """
    if cell.cluster.device == "cpu":
        expected = _by_cost_model(cell, another_cpu(), OTHER_CPU, threads=cell.cluster.threads_per_rank)
        return expected and replace(expected, caveat=CAVEAT)
    if not has_rates(cell.hardware):
        return None
    return _by_cost_model(cell, hardware_of(cell.hardware), f"the cost model on hardware={cell.hardware}")


def _by_cost_model(cell: Cell, hardware: Hardware, basis: str, threads: int = 1) -> ExpectedStep | None:
    """Return the expected step time if `threads` CPU threads share a rank's workload; 1 on a GPU."""
    prediction = predict(cell, hardware, None)
    return (
        None if prediction is None else ExpectedStep(prediction.step_time_ms.expected / 1e3 / threads, basis)
    )
