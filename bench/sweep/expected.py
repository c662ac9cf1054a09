"""How long a step should take before one has been timed: by the cost model, on a CPU as fast as this one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bench.config import ConfigError, RunConfig
from bench.cost.band import End
from bench.cost.calibrated_speeds import CalibratedSpeeds, speeds_of
from bench.cost.hardware import is_calibrated
from bench.cost.prediction import predict
from bench.environment import REPOSITORY
from bench.request.hardware import calibrated_facts, hardware_of, has_rates
from bench.request.modes import starts_ranks
from bench.sweep.cpu_speed import ProbeTask, ProbeTimes, probed, seconds_here

PROBED = "attention and matrix products timed here just now"
OTHER_CPU = "the cost model, as another CPU was calibrated"
STAND_IN = REPOSITORY / "results" / "reference" / "accuracy" / "hardware.yaml"
"""A calibration of two CPU cores, for a CPU that was not calibrated itself."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of one step."""

    seconds: float
    basis: str
    """What says so, in words."""


def timed_here(cells: Iterable[RunConfig]) -> Callable[[RunConfig], Expected | None]:
    """Return what says how long steps of these legal cells take, after timing this CPU for its cells."""
    times = probed(ProbeTask.of(cell) for cell in cells if _needs_probe(cell))
    return lambda cell: _as_probed(cell, times) or modelled(cell)


def _needs_probe(cell: RunConfig) -> bool:
    return starts_ranks(cell) and cell.cluster.device == "cpu" and not has_rates(cell.hardware)


def _as_probed(cell: RunConfig, times: dict[ProbeTask, ProbeTimes]) -> Expected | None:
    its = times.get(ProbeTask.of(cell))
    if its is None:
        return None
    hardware = hardware_of(os.fspath(STAND_IN))
    prediction, speeds = predict(cell, hardware, None), speeds_of(hardware, End.EXPECTED)
    if prediction is None or not isinstance(speeds, CalibratedSpeeds):
        return None
    return Expected(seconds_here(cell, prediction, speeds, its), PROBED)


def modelled(cell: RunConfig) -> Expected | None:
    """By arithmetic, where the hardware's file says what it sustains, and a CPU by another CPU's."""
    if has_rates(cell.hardware):
        return _predicted(cell, cell.hardware, f"the cost model on {named(cell.hardware)}")
    if cell.cluster.device == "cpu" and STAND_IN.exists():
        return _predicted(cell, os.fspath(STAND_IN), OTHER_CPU)
    return None


def named(hardware: str) -> str:
    """A cell's hardware as it is asked for."""
    return f"hardware.path={hardware}" if is_calibrated(hardware) else f"hardware={hardware}"


def _predicted(cell: RunConfig, hardware: str, basis: str) -> Expected | None:
    try:
        prediction = predict(cell, hardware_of(hardware), None)
    except ConfigError:
        return None
    if prediction is None:
        return None
    seconds = prediction.step_time_ms.expected / 1e3
    if is_calibrated(hardware) and cell.cluster.device == "cpu":
        # Its tables are of so many threads a rank; the reference's cells of two ran twice as fast.
        threads = int(calibrated_facts(hardware)["calibrated"].get("threads_per_rank", 1))
        seconds *= threads / cell.cluster.threads_per_rank
    return Expected(seconds, basis)
