"""Datasheet numbers of devices: the files of conf/hardware/, matched by the exact names that NVML reports.

Cards of one generation differ in clocks and memory, so a part of a name would match the wrong datasheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from bench.common.environment import Machine
from bench.common.labels import GIB, value_label
from bench.config import UNKNOWN_HARDWARE, Cell, ConfigError
from bench.request.choices import Raw, options, read_option


@cache
def known_hardware() -> Mapping[str, Mapping[str, Any]]:
    """Return the content of each file of conf/hardware/ that describes a GPU, by the name of the file."""
    contents = (read_option("hardware", name) for name in options("hardware"))
    return {str(content["name"]): content for content in contents if "device_names" in content}


def refuse_changed_numbers(raw: Raw) -> None:
    """Raise ConfigError if the request changes numbers of a device, since a record stores only its name."""
    name = raw["name"]
    content = read_option("hardware", name) if name in options("hardware") else raw
    for key, value in raw.items():
        if value != content.get(key):
            raise ConfigError(
                f"hardware.{key}={value_label(value)}: the numbers of a device come from its file; copy"
                f" conf/hardware/{name}.yaml, change the copy and name it in hardware=... (docs/hardware.md)"
            )


def hardware_of_machine(machine: Machine, device: str) -> str:
    """Return the name in conf/hardware/ of this machine's GPU, or `cpu`; UNKNOWN_HARDWARE without a file."""
    if device == "cpu":
        return "cpu"
    if not machine.gpus:  # bench.observe may run on a GPU that NVML does not list
        return UNKNOWN_HARDWARE
    matches = (name for name, facts in known_hardware().items() if machine.gpus[0] in facts["device_names"])
    return next(matches, UNKNOWN_HARDWARE)


def compute_capability(cell: Cell, machine: Machine) -> float | None:
    """Return the compute capability of a cell's GPUs from their file, or as this machine reports it.

    None for CPU ranks, and for a prediction for GPUs whose file does not state it.
    """
    if cell.cluster.device != "cuda":
        return None
    known = known_hardware().get(cell.hardware, {}).get("compute_capability")
    reported = () if cell.mode == "predict" else machine.gpu_capabilities
    capability = known or next(iter(reported), None)
    return None if capability is None else float(capability)


def usable_bytes(cell: Cell, machine: Machine) -> int | None:
    """Return the bytes that one rank may use: its share of the GPU, or the limit of the cell if that is less.

    None if there is neither. A CPU rank without a limit is such a case, as CPU ranks share the host's memory.
    """
    limit_gib = cell.cluster.memory_limit_gib
    limit = None if limit_gib is None else round(limit_gib * GIB)
    gpu_bytes = _gpu_bytes(cell.hardware, machine) if cell.cluster.device == "cuda" else None
    share = None if gpu_bytes is None else gpu_bytes // cell.cluster.ranks_per_gpu
    return min((size for size in (limit, share) if size is not None), default=None)


def _gpu_bytes(hardware: str, machine: Machine) -> int | None:
    """Return the usable memory of a GPU by its file; without a file, the memory that NVML reports."""
    known = known_hardware().get(hardware)
    if known is not None:
        return int(known["usable_bytes"])
    return min(machine.gpu_memory_bytes, default=None)
