"""The cost model's word on a claim's cell. Only this module asks the request for cells."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache
from typing import Any

from analysis.published.choices import Words
from bench.config import ConfigError, RunConfig
from bench.cost.band import Band, End
from bench.cost.calibrated_speeds import speeds_of
from bench.cost.hardware import Hardware
from bench.cost.memory import memory_need
from bench.cost.prediction import Prediction, needed_band, predict
from bench.cost.time import attention_time, counted
from bench.environment import Machine
from bench.request.choices import groups, option, read_option, refuse_no_conf
from bench.request.composition import composed
from bench.request.hardware import hardware_of, usable_bytes
from bench.request.legality import refusal
from bench.request.resolve import resolve
from bench.strategies import STRATEGIES
from bench.strategies.facts import CallMemory
from bench.strategies.schedule import Schedule

NO_MACHINE = Machine(gpus=(), cores=1, cpu="described", memory_bytes=0)
"""A claim's cell is about the hardware that it names."""
BEFOREHAND = ("mode=predict", "data=synthetic", "pad=true")
"""Tokens are not read; a length that the ranks do not divide is filled up."""


class CostModel:
    """Cells by their settings, and what is predicted of them; raises ConfigError without the folder conf."""

    def __init__(self) -> None:
        refuse_no_conf()

    def cell(self, settings: Words) -> RunConfig:
        """The cell; raises ConfigError where the request refuses it, or no time or memory can be computed."""
        return _cell(_key(settings))

    def prediction(self, settings: Words) -> Prediction:
        """Of a cell that trains."""
        return _prediction(_key(settings))

    def memory(self, settings: Words) -> tuple[Band, int | None]:
        """What a rank of a cell that trains needs and may take, None where nothing says the latter.

        Without the time, which takes long to compute at millions of tokens.
        """
        return _memory(_key(settings))

    def schedule(self, settings: Words) -> Schedule:
        """What one call of attention computes and sends."""
        cell = self.cell(settings)
        found = STRATEGIES[cell.strategy].schedule(cell)
        if found is None:
            raise ConfigError(f"no schedule for strategy={cell.strategy}")
        return found

    def call_memory(self, settings: Words) -> CallMemory:
        """What one call of attention takes."""
        cell = self.cell(settings)
        found = STRATEGIES[cell.strategy].call_memory(cell)
        if found is None:
            raise ConfigError(f"no formula for what a call of strategy={cell.strategy} takes")
        return found

    def attention_s(self, settings: Words, end: End) -> Mapping[str, float]:
        """Seconds of one call of attention alone by pass: fwd, bwd and fwd+bwd."""
        cell, schedule = self.cell(settings), self.schedule(settings)
        speeds = speeds_of(_hardware_with(cell), end)
        forward, backward = (
            sum((time.kernels_s, time.packing_s, time.exposed_s))
            for time in (
                attention_time(cell, counted(schedule.forward), speeds, backward=False),
                attention_time(cell, counted(schedule.backward), speeds, backward=True),
            )
        )
        return {"fwd": forward, "bwd": backward, "fwd+bwd": forward + backward}

    def peak_flops_per_s(self, settings: Words) -> float:
        """Of one device, dense, in 16 bits."""
        return hardware_of(self.cell(settings).hardware).peak_flops_per_s


Key = tuple[tuple[str, str | int | float | bool], ...]


def _key(settings: Words) -> Key:
    return tuple(sorted(settings.items()))


@cache
def _prediction(settings: Key) -> Prediction:
    cell = _cell(settings)
    found = predict(cell, hardware_of(cell.hardware), usable_bytes(cell, NO_MACHINE))
    if found is None:
        raise ConfigError(f"no formula for strategy={cell.strategy} and workload={cell.workload.name}")
    return found


@cache
def _memory(settings: Key) -> tuple[Band, int | None]:
    cell = _cell(settings)
    need = memory_need(cell)
    if need is None:
        raise ConfigError(f"no formula for the memory of workload={cell.workload.name}")
    return needed_band(cell, need), usable_bytes(cell, NO_MACHINE)


@cache
def _cell(settings: Key) -> RunConfig:
    cell = resolve(_raw(dict(settings)), NO_MACHINE)
    refused = OF_WORKLOAD[cell.workload.name](cell)
    if refused is not None:
        raise ConfigError(refused)
    return cell


def _attention_refusal(cell: RunConfig) -> str | None:
    """Why attention alone has no time; the request predicts training only."""
    _hardware_with(cell)
    return "; ".join(STRATEGIES[cell.strategy].refusals(cell)) or None


OF_WORKLOAD: Mapping[str, Callable[[RunConfig], str | None]] = {
    "attention": _attention_refusal,
    "train": refusal,
}


def _hardware_with(cell: RunConfig) -> Hardware:
    """The cell's hardware; raises ConfigError where it has no rate of the cell's kernel."""
    found = hardware_of(cell.hardware)
    if not speeds_of(found, End.EXPECTED).knows(cell):
        raise ConfigError(f"no rate of kernel={cell.kernel} on hardware={cell.hardware}")
    return found


def _raw(settings: Words) -> dict[str, Any]:
    """The default request with these settings; a choice brings its file's values first."""
    raw: dict[str, Any] = deepcopy(dict(_default()))
    chosen = {key: value for key, value in settings.items() if key in groups()}
    raw |= {key: dict(_option(key, option(key, name))) for key, name in chosen.items()}
    for key, value in settings.items():
        section, _, name = key.rpartition(".")
        if key not in chosen:
            (raw[section] if section else raw)[name] = value
    return raw


_option = cache(read_option)


@cache
def _default() -> Mapping[str, Any]:
    return composed(*BEFOREHAND)
