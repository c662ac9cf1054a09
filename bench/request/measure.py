"""How much of what is measured: the words of `measure`, with the defaults of the device that ranks run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from bench.config import AUTO, MeasureConfig
from bench.request import values
from bench.request.choices import Raw


@dataclass(frozen=True, slots=True)
class WindowDefaults:
    """What `auto` stands for."""

    budget_s: float
    warmup_s: float
    least_steps: int
    silence_s: float
    repeats: int | Literal["auto"]


WINDOWS: Mapping[str, WindowDefaults] = {
    "cpu": WindowDefaults(budget_s=20.0, warmup_s=0.0, least_steps=0, silence_s=30.0, repeats=1),
    "cuda": WindowDefaults(budget_s=60.0, warmup_s=10.0, least_steps=6, silence_s=120.0, repeats=AUTO),
}
"""By device. On a GPU a step of the longest lengths takes 10 s, and six steps give an interval; on a CPU it
takes half a minute, and one has to do. Repeats tell strategies apart, which results of a CPU cannot do."""


def measure_config(raw: Raw, device: str) -> MeasureConfig:
    """The numbers of `measure` for ranks on this device; raises ConfigError for a value that is no good."""
    window = WINDOWS[device]
    return MeasureConfig(
        steps=values.whole("measure.steps", raw["steps"]),
        warmup_steps=values.whole("measure.warmup_steps", raw["warmup_steps"], least=0),
        warmup_s=_seconds(raw, "warmup_s", window.warmup_s, or_none=True),
        least_steps=_given(raw, "least_steps", window.least_steps),
        budget_s=_seconds(raw, "budget_s", window.budget_s),
        repeats=window.repeats if raw["repeats"] == AUTO else values.whole("measure.repeats", raw["repeats"]),
        repeats_budget_s=_seconds(raw, "repeats_budget_s"),
        reference_budget_s=_seconds(raw, "reference_budget_s", or_none=True),
        timeout_s=_seconds(raw, "timeout_s"),
        trace=values.flag("measure.trace", raw["trace"]),
        keep_traces=values.flag("measure.keep_traces", raw["keep_traces"]),
        gradients=values.flag("measure.gradients", raw["gradients"]),
        silence_s=_seconds(raw, "silence_s", window.silence_s, or_none=True),
    )


def _seconds(raw: Raw, key: str, default: float | None = None, *, or_none: bool = False) -> float:
    """The seconds that were asked for; `default` for AUTO, where there is one."""
    if default is not None and raw[key] == AUTO:
        return default
    return values.seconds(f"measure.{key}", raw[key], or_none=or_none)


def _given(raw: Raw, key: str, default: int) -> int:
    return default if raw[key] == AUTO else values.whole(f"measure.{key}", raw[key], least=0)
