"""How long a step should take before one has been timed: as here before, or by the cost model."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.cell.run import RUNS
from bench.config import ConfigError, RunConfig
from bench.cost.band import End
from bench.cost.calibrated_speeds import CalibratedSpeeds, speeds_of
from bench.cost.flops import hardware_flops
from bench.cost.hardware import is_calibrated
from bench.cost.prediction import predict
from bench.cpu_arithmetic import estimated_products
from bench.environment import REPOSITORY, Machine
from bench.record import Status
from bench.request.hardware import calibrated_facts, hardware_of, has_rates
from bench.request.legality import refusal
from bench.store import StoreError, read_records
from bench.sweep.cpu_speed import ProbeTask, ProbeTimes, probed, seconds_here
from bench.sweep.repeats import step_ms

SWEEPS = Path("results/sweeps")
PROBED = "attention and matrix products timed here just now"
OTHER_CPU = "the cost model, as another CPU was calibrated"
MOST_SWEEPS = 5
"""Folders that are read, the latest first: a plan should not take longer than a person waits."""
MOST_BYTES = 4_000_000
"""Of one file of records."""
MOST_DOUBLINGS = 2
"""Between the FLOPs of two steps whose rates are taken to be the same."""
STAND_IN = REPOSITORY / "results" / "reference" / "accuracy" / "hardware.yaml"
"""A calibration of two CPU cores, for a CPU that was not calibrated itself."""
ALIKE = (
    "strategy", "layout", "kernel", "dtype", "model", "model.hidden_size", "model.num_layers", "engine",
    "trainer", "workload", "batch", "grad_accum", "cluster.device", "cluster.world_size",
    "cluster.threads_per_rank", "sp_degree", "ulysses_degree", "checkpointing", "tiled_mlp",
    "offload.activations", "offload.optimizer",
)  # fmt: skip
"""Settings in which a cell and a record agree whose steps run at one rate."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Seconds of one step."""

    seconds: float
    basis: str
    """What says so, in words."""


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One record's step."""

    flops: int
    seconds: float


class ExpectedSteps:
    """What is known of steps on a machine before a sweep begins."""

    def __init__(self, machine: Machine, records: Iterable[Mapping[str, Any]] = ()) -> None:
        """`records` are earlier ones; those of another machine count for nothing."""
        self._measured: dict[tuple[Any, ...], list[MeasuredStep]] = {}
        self._probed: Mapping[ProbeTask, ProbeTimes] = {}
        for record in records:
            if _is_of(record, machine):
                flops = int(record["analytic"]["hardware_flops_causal"])
                step = MeasuredStep(flops, step_ms(record) / 1e3)
                self._measured.setdefault(_kind(record["config"]), []).append(step)

    def probe(self, cells: Iterable[RunConfig]) -> None:
        """Time this CPU for those of these cells that run on it and that no earlier sweep knows."""
        self._probed = probed(ProbeTask.of(cell) for cell in cells if self._needs_probe(cell))

    def _needs_probe(self, cell: RunConfig) -> bool:
        runs_here = cell.mode in RUNS and cell.cluster.device == "cpu" and not has_rates(cell.hardware)
        return runs_here and refusal(cell) is None and self._as_measured(cell) is None

    def of(self, cell: RunConfig) -> Expected | None:
        """By what was measured here, else by the cost model; None where neither says anything."""
        return self._as_measured(cell) or self._as_probed(cell) or modelled(cell)

    def _as_probed(self, cell: RunConfig) -> Expected | None:
        times = self._probed.get(ProbeTask.of(cell)) if self._probed else None
        if times is None:
            return None
        hardware = hardware_of(os.fspath(STAND_IN))
        prediction, speeds = predict(cell, hardware, None), speeds_of(hardware, End.EXPECTED)
        if prediction is None or not isinstance(speeds, CalibratedSpeeds):
            return None
        return Expected(seconds_here(cell, prediction, speeds, times), PROBED)

    def _as_measured(self, cell: RunConfig) -> Expected | None:
        steps = self._measured.get(_kind(cell.flat()), [])
        if not steps:
            return None
        flops = hardware_flops(cell, causal=True)
        nearest = min(steps, key=lambda step: max(step.flops / flops, flops / step.flops))
        if max(nearest.flops / flops, flops / nearest.flops) > 2**MOST_DOUBLINGS:
            return None
        return Expected(nearest.seconds * flops / nearest.flops, "what earlier sweeps measured here")


def earlier_records(folder: Path = SWEEPS) -> list[Mapping[str, Any]]:
    """The records of the latest sweeps; a file that cannot be read, or is long, counts as empty."""
    files = sorted(folder.glob("*/records.jsonl"), reverse=True)[:MOST_SWEEPS]
    found: list[Mapping[str, Any]] = []
    for file in files:
        try:
            if file.stat().st_size <= MOST_BYTES:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of a torn line: a resume of that sweep says so
                    found += read_records(file)
        except (OSError, StoreError):
            continue
    return found


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


def _is_of(record: Mapping[str, Any], machine: Machine) -> bool:
    """Whether a record says how fast this machine's steps are."""
    environment, is_ok = record["environment"], record["status"] == Status.OK
    products = environment.get("cpu_products")
    if products not in (None, estimated_products(record["config"]["dtype"])):
        return False
    same = environment.get("device_name") == machine.device_name and environment.get("cores") == machine.cores
    is_measured = record["provenance"] == "measured" and record.get("timing") is not None
    return is_ok and is_measured and same and record["analytic"].get("hardware_flops_causal") is not None


def _kind(flat: Mapping[str, Any]) -> tuple[Any, ...]:
    """Records of before a switch existed had it off."""
    return tuple(flat.get(name) or None for name in ALIKE)
