"""What machine and software ran a cell. Reads NVML and psutil; never touches CUDA."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch",
    "deepspeed",
    "ring-flash-attn",
    "flash-attn",
    "flash-attn-3",
    "flash-attn-4",
    "transformers",
    "accelerate",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices at hand."""

    gpus: tuple[str, ...]
    cores: int
    cpu: str
    memory_bytes: int
    gpu_memory_bytes: tuple[int, ...] = ()
    """What each of `gpus` has in all, as NVML counts it; less is left for tensors."""

    @property
    def device_name(self) -> str:
        return self.gpus[0] if self.gpus else self.cpu


@dataclass(frozen=True, slots=True)
class Gpu:
    """One device as NVML knows it."""

    name: str
    memory_bytes: int


@cache
def this_machine() -> Machine:
    """The visible GPUs by NVML's names, the cores this process may use, the processor and the memory."""
    gpus = _visible_gpus()
    return Machine(
        gpus=tuple(gpu.name for gpu in gpus),
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu_name(),
        memory_bytes=psutil.virtual_memory().total,
        gpu_memory_bytes=tuple(gpu.memory_bytes for gpu in gpus),
    )


def installed(package: str) -> str | None:
    """The version of a distribution, or None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(strategy_package: Mapping[str, str]) -> dict[str, Any]:
    """The record's `environment`: machine, software versions, code and load, as plain JSON values.

    `strategy_package` is the distribution of the cell's strategy, and its version; empty for ours.
    """
    commit = _git("rev-parse", "HEAD")
    return {
        **asdict(this_machine()),
        "device_name": this_machine().device_name,
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in PACKAGES} | dict(strategy_package),
        **({"strategy_package": min(strategy_package)} if strategy_package else {}),
        "gpu_driver": _gpu_driver(),
        "git_commit": commit,
        "git_dirty": None if commit is None else bool(_git("status", "--porcelain")),
        "load_average": os.getloadavg()[0],
        "argv": sys.argv,
    }


def _visible_gpus() -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves; none where NVML is absent."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        gpus = [
            Gpu(str(pynvml.nvmlDeviceGetName(handle)), int(pynvml.nvmlDeviceGetMemoryInfo(handle).total))
            for handle in handles
        ]
        uuids = [str(pynvml.nvmlDeviceGetUUID(handle)) for handle in handles]
    except pynvml.NVMLError:
        return ()
    chosen = visible_devices(os.environ.get("CUDA_VISIBLE_DEVICES"), uuids)
    return tuple(gpus[index] for index in chosen)


def _gpu_driver() -> str | None:
    """The version of NVIDIA's driver, None where there is none."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return None


def visible_devices(variable: str | None, uuids: Sequence[str]) -> list[int]:
    """The devices that a value of CUDA_VISIBLE_DEVICES leaves, as CUDA reads it.

    The first entry that names no device ends the list, and one that repeats a device empties it.
    """
    if variable is None:
        return [*range(len(uuids))]
    chosen: list[int] = []
    for entry in map(str.strip, variable.split(",")):
        index = _device_index(entry, uuids)
        if index is None:
            break
        if index in chosen:
            return []
        chosen.append(index)
    return chosen


def _device_index(entry: str, uuids: Sequence[str]) -> int | None:
    """A device by its number, or by as much of its UUID as no other shares; a MIG slice by its GPU's."""
    if entry.isascii() and entry.isdigit():
        return int(entry) if int(entry) < len(uuids) else None
    if entry.startswith("MIG-"):
        return 0 if uuids else None
    matching = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
    return matching[0] if len(matching) == 1 else None


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603  fixed arguments, no shell
            ["git", "-C", str(REPOSITORY), *arguments],  # noqa: S607  the user's own git
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
