"""The sections `measure` and `env` of a cell, whose defaults and rules depend on the device of the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bench.common.labels import value_label
from bench.config import ALLOCATOR_VARIABLES, AUTO, ConfigError, MeasureConfig, Seconds
from bench.request import values
from bench.request.choices import Raw

ENV_ALLOWED = (
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_",
    *ALLOCATOR_VARIABLES,
    "TORCH_NCCL_",
)
"""Beginnings of the names of environment variables that a request may set."""
DEVICE_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "cpu": {
        "budget_s": 20.0, "warmup_s": 0.0, "min_timed_steps": 0, "reference_budget_s": 60.0, "repeats": 1,
    },
    "cuda": {
        "budget_s": 30.0, "warmup_s": 10.0, "min_timed_steps": 3, "reference_budget_s": 180.0,
        "repeats": AUTO,
    },
}  # fmt: skip
"""Values of `auto` by device.

A step of the longest sequences takes 10 s on a GPU. Three timed steps are enough there, since processes
differ more than the steps of one process. On a CPU such a step takes half a minute, so one timed step has to
be enough. Cells of CPU ranks are not repeated, because repeats serve to rank strategies, for which CPU times
are no use. A reference on a GPU has a longer budget, because it takes half a minute to start.
"""


def measure_config(raw: Raw, device: str) -> MeasureConfig:
    """Return the section `measure`, with `auto` replaced; raise ConfigError for a bad value."""
    defaults = DEVICE_DEFAULTS[device]
    settings = {key: defaults.get(key, value) if value == AUTO else value for key, value in raw.items()}
    for key in ("budget_s", "repeats_budget_s", "timeout_s"):  # only bench.observe may use 0
        values.convert(f"measure.{key}", settings[key], Seconds)
    measure = values.section("measure", settings, MeasureConfig)
    if device == "cpu" and measure.nvtx:
        raise ConfigError("measure.nvtx=true: the ranks run on the CPU, not on a GPU; leave it out")
    return measure


def env_pairs(raw: Any, device: str) -> tuple[tuple[str, str], ...]:
    """Return the section `env` as sorted pairs of name and value.

    Raises ConfigError for a variable that may not be set here, or that a rank would read too late.
    """
    if not isinstance(raw, Mapping):
        raise ConfigError(f"env={value_label(raw)}: must be variables with their names; write env.NAME=value")
    for name, value in raw.items():
        if not name.startswith(ENV_ALLOWED):
            raise ConfigError(
                f"env.{name}: only variables of communication and memory allocation can be set here"
                f" ({', '.join(ENV_ALLOWED)}); set others before the command"
            )
        if isinstance(value, list | Mapping) or value is None:
            raise ConfigError(f"env.{name}={value_label(value)}: must be text; write env.{name}=value")
    pairs = tuple(sorted((name, str(value)) for name, value in raw.items()))
    for name, value in pairs:
        if name in ALLOCATOR_VARIABLES:
            _refuse_allocator_settings(name, value, device)
    return pairs


def _refuse_allocator_settings(name: str, value: str, device: str) -> None:
    setting = f"env.{name}={value_label(value)}"
    if device != "cuda":
        raise ConfigError(
            f"{setting}: configures the CUDA allocator, but the ranks run on the CPU; leave it out"
        )
    if ":" not in value:
        raise ConfigError(
            f"{setting}: must be settings with values; write env.{name}=expandable_segments:True"
        )
    if "backend:" in value.replace(" ", ""):
        raise ConfigError(
            f"{setting}: torch chooses the backend when it is imported, before a rank can change it; set"
            f" {name}={value} before the command instead"
        )
