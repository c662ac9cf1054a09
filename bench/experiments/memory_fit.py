"""Which cells of the default sweep fit which device: needed against usable memory. Runs nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bench.config import ConfigError, RunConfig
from bench.cost.band import Band
from bench.cost.fit import Fit, fit_of
from bench.cost.memory import MemoryNeed, memory_need
from bench.cost.memory_band import needed_band
from bench.environment import Machine
from bench.request import values
from bench.request.choices import Raw, default_strategies, read_option
from bench.request.hardware import known_hardware, usable_bytes
from bench.request.lone_rank import for_lone_ranks
from bench.request.resolve import resolve

NO_MACHINE = Machine(gpus=(), cores=1, cpu="hypothetical", memory_bytes=0)
"""Cells name their hardware: what a device has is read from its file."""


@dataclass(frozen=True, slots=True)
class Room:
    """What one rank of a cell needs, and what its device offers."""

    cell: RunConfig
    need: MemoryNeed
    usable: int

    @property
    def needed(self) -> Band:
        return needed_band(self.cell, self.need)

    @property
    def fit(self) -> Fit:
        return fit_of(self.needed, self.usable)


def cells_on_described_gpus(raws: Sequence[Raw], machine: Machine) -> list[RunConfig]:  # noqa: ARG001
    """The cells that every request plans on each number of each device; equal cells are one.

    Raises ConfigError for an invalid value.
    """
    cells = (
        resolve(kept, described)
        for raw in raws
        for described, full in _closed(raw)
        for kept in for_lone_ranks(full, described)[0]
    )
    return [*{cell.cell_id: cell for cell in cells}.values()]


def room_of(cell: RunConfig) -> Room:
    """The estimate of a cell beside its device; raises ConfigError for what is not estimated."""
    need, usable = memory_need(cell), usable_bytes(cell, NO_MACHINE)
    if need is None or usable is None:
        raise ConfigError(
            "experiment=memory_fit: estimates training on the devices of conf/hardware/; leave out workload"
            " and cluster.device"
        )
    return Room(cell, need, usable)


def _closed(raw: Raw) -> Iterator[tuple[Machine, list[dict[str, Any]]]]:
    """Per device and number of GPUs a machine, and the request with every choice made."""
    asked = raw["hardware"]["name"]
    names = [*known_hardware()] if asked == "auto" else [values.choice("hardware", asked, known_hardware())]
    named = [raw["strategy"]] if "strategy" in raw else None
    strategies = named or [read_option("strategy", name) for name in default_strategies()]
    sizes = [values.whole("cluster.world_size", each) for each in _as_list(raw["cluster"]["world_size"])]
    for name in names:
        device = next(iter(known_hardware()[name]["device_names"]), name)
        for gpus in sizes:
            cluster = {**raw["cluster"], "world_size": gpus}
            full = {**raw, "hardware": {"name": name}, "cluster": cluster}
            described = Machine(gpus=(device,) * gpus, cores=1, cpu="hypothetical", memory_bytes=0)
            lengths = _as_list(raw["seq_len"])
            yield (
                described,
                [{**full, "strategy": s, "seq_len": length} for s in strategies for length in lengths],
            )


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
