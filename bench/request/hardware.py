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
    """Return the datasheet numbers of each device in conf/hardware/, by the name of its file."""
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
    """Return this machine's device by its name in conf/hardware/; UNKNOWN_HARDWARE without a file."""
    if device == "cpu":
        return "cpu"
    if not machine.gpus:  # bench.observe may run on a GPU that NVML does not list
        return UNKNOWN_HARDWARE
    matches = (name for name, facts in known_hardware().items() if machine.gpus[0] in facts["device_names"])
    return next(matches, UNKNOWN_HARDWARE)


def compute_capability(cell: Cell, machine: Machine) -> float | None:
    """Return the compute capability of a cell's GPUs by their file, or as this machine reports it.

    None for a CPU, and for a prediction about GPUs without a file.
    """
    if cell.cluster.device != "cuda":
        return None
    known = known_hardware().get(cell.hardware, {}).get("compute_capability")
    reported = () if cell.mode == "predict" else machine.gpu_capabilities
    capability = known or next(iter(reported), None)
    return None if capability is None else float(capability)


def usable_bytes(cell: Cell, machine: Machine) -> int | None:
    """Return the bytes that one rank may use on its device under the limit of the cell; None if unknown.

    The memory of a GPU without a file is that reported by NVML. CPU ranks share the memory of the host, so
    their bytes are unknown without a limit.
    """
    limit_gib = cell.cluster.memory_limit_gib
    limit = None if limit_gib is None else round(limit_gib * GIB)
    whole = _device_bytes(cell.hardware, machine) if cell.cluster.device == "cuda" else None
    share = None if whole is None else whole // cell.cluster.ranks_per_gpu
    return min((size for size in (limit, share) if size is not None), default=None)


def _device_bytes(hardware: str, machine: Machine) -> int | None:
    known = known_hardware().get(hardware)
    if known is not None:
        return int(known["usable_bytes"])
    return min(machine.gpu_memory_bytes, default=None)
