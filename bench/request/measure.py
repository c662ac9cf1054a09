"""How much of what is measured: the words of `measure`, with the defaults of the device that ranks run on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.config import AUTO, ConfigError, MeasureConfig, Seconds
from bench.request import values
from bench.request.choices import Raw

WINDOWS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {
        "budget_s": 20.0, "warmup_s": 0.0, "least_steps": 0, "reference_budget_s": 60.0, "repeats": 1,
    },
    "cuda": {
        "budget_s": 30.0, "warmup_s": 10.0, "least_steps": 3, "reference_budget_s": 180.0, "repeats": AUTO,
    },
}  # fmt: skip
"""Values of `auto` by device. On a GPU a step of the longest lengths takes 10 s and three have to do, as
processes differ by more than steps of one process do; on a CPU it takes half a minute, and one has to do.
Repeats tell strategies apart, which results of a CPU cannot do. A reference on a GPU takes half a minute to
begin."""


def measure_config(raw: Raw, device: str) -> MeasureConfig:
    """The numbers of `measure` for ranks on this device; raises ConfigError for a value that is no good."""
    window = WINDOWS[device]
    given = {key: window.get(key, value) if value == AUTO else value for key, value in raw.items()}
    for key in ("budget_s", "repeats_budget_s", "timeout_s"):  # 0 is for loops that are observed
        values.checked(f"measure.{key}", given[key], Seconds)
    measure = values.section("measure", given, MeasureConfig)
    if device == "cpu" and measure.nvtx:
        raise ConfigError("measure.nvtx=true: the ranks run on the CPU, not on a GPU; leave it out")
    return measure
