"""How long a step should take before one has been timed: by the cost model, on a CPU as fast as this one."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from bench.config import RunConfig
from bench.extras.predict.cpu_speed import ProbeTask, ProbeTimes, probed, seconds_here
from bench.extras.predict.hardware import Hardware, another_cpu, hardware_of, has_rates
from bench.extras.predict.prediction import predict
from bench.plan.estimate import Expected
from bench.request.modes import starts_ranks

PROBED = "attention and matrix products timed here just now"
OTHER_CPU = "the cost model at another CPU's rates"
CAVEAT = "that other CPU is an AMD EPYC; this one may take a multiple"


def timed_here(cells: Iterable[RunConfig]) -> Callable[[RunConfig], Expected | None]:
    """Return what says how long steps of these legal cells take, after timing this CPU for its cells."""
    times = probed(ProbeTask.of(cell) for cell in cells if _needs_probe(cell))
    return lambda cell: _as_probed(cell, times) or modelled(cell)


def _needs_probe(cell: RunConfig) -> bool:
    return starts_ranks(cell) and cell.cluster.device == "cpu"


def _as_probed(cell: RunConfig, times: dict[ProbeTask, ProbeTimes]) -> Expected | None:
    its = times.get(ProbeTask.of(cell))
    prediction = None if its is None else predict(cell, another_cpu(), None)
    if its is None or prediction is None:
        return None
    return Expected(seconds_here(cell, prediction.parts, another_cpu(), its), PROBED)


def modelled(cell: RunConfig) -> Expected | None:
    """Return what arithmetic expects of a step: by the file of a GPU, or on a CPU by another CPU's rates."""
    if cell.cluster.device == "cpu":
        expected = _predicted(cell, another_cpu(), OTHER_CPU, threads=cell.cluster.threads_per_rank)
        return expected and replace(expected, caveat=CAVEAT)
    if not has_rates(cell.hardware):
        return None
    return _predicted(cell, hardware_of(cell.hardware), f"the cost model on hardware={cell.hardware}")


def _predicted(cell: RunConfig, hardware: Hardware, basis: str, threads: int = 1) -> Expected | None:
    """Return the step's expected seconds; `hardware` is one of `threads` that share a rank's work."""
    prediction = predict(cell, hardware, None)
    return None if prediction is None else Expected(prediction.step_time_ms.expected / 1e3 / threads, basis)
