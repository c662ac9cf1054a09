"""What is known of a device: the files of conf/hardware/, matched by the exact names that NVML gives.

Cards of one generation differ in clocks and memory, so that part of a name would match the wrong datasheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from bench.common.environment import Machine
from bench.common.labels import GIB, shown
from bench.config import UNKNOWN_HARDWARE, Cell, ConfigError
from bench.request.choices import Raw, options, read_option


@cache
def known_hardware() -> Mapping[str, Mapping[str, Any]]:
    """The datasheet numbers of every device that a file of conf/hardware/ describes, by the file's name."""
    contents = (read_option("hardware", name) for name in options("hardware"))
    return {str(content["name"]): content for content in contents if "device_names" in content}


def refuse_changed(raw: Raw) -> None:
    """Raises ConfigError where the words changed a device's numbers: a record names its file alone."""
    name = raw["name"]
    given = read_option("hardware", name) if name in options("hardware") else raw
    for key, value in raw.items():
        if value != given.get(key):
            raise ConfigError(
                f"hardware.{key}={shown(value)}: a device's numbers are those of its file; copy"
                f" conf/hardware/{name}.yaml, change the copy and name that (docs/hardware.md)"
            )


def this_hardware(machine: Machine, device: str) -> str:
    """The choice of conf/hardware/ that this machine is; UNKNOWN_HARDWARE for a GPU that has none."""
    if device == "cpu":
        return "cpu"
    if not machine.gpus:  # observed loops may run on one that NVML does not show
        return UNKNOWN_HARDWARE
    fits = (name for name, facts in known_hardware().items() if machine.gpus[0] in facts["device_names"])
    return next(fits, UNKNOWN_HARDWARE)


def capability_of(cell: Cell, machine: Machine) -> float | None:
    """The compute capability of a cell's GPUs, by its hardware's file, or as seen where it runs."""
    if cell.cluster.device != "cuda":
        return None
    known = known_hardware().get(cell.hardware, {}).get("compute_capability")
    here = () if cell.mode == "predict" else machine.gpu_capabilities
    seen = known or next(iter(here), None)
    return None if seen is None else float(seen)


def usable_bytes(cell: Cell, machine: Machine) -> int | None:
    """What one rank's process may take of its device, the limit of the cell included; None where unknown.

    A GPU that no file describes has at most what NVML counts. CPU ranks share the host's memory: only a
    limit says what one of them may take.
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
