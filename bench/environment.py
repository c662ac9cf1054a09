"""What machine and software ran a cell, and the variables that it found set; never touches CUDA."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from bench.nvml import gpu_facts, visible_gpus
from bench.origin import sources_digest

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = (
    "ulysses-ring-bench",
    "torch",
    "deepspeed",
    "ring-flash-attn",
    "axolotl-ringmaster",
    "yunchang",
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
CUDA_PACKAGES = tuple(name for name in PACKAGES if name.startswith("nvidia-"))
"""Those of PACKAGES that only a GPU's ranks use."""
INHERITED = ("CUDA_", "GLOO_", "NCCL_", "OMP_", "TORCH_NCCL_")
"""How the variables begin that change what a cell does and were set before the command."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices at hand."""

    gpus: tuple[str, ...]
    cores: int
    cpu: str
    memory_bytes: int
    gpu_memory_bytes: tuple[int, ...] = ()
    """What each of `gpus` has in all, as NVML counts it; less is left for tensors."""
    gpu_error: str | None = None
    """Why a GPU that is there is not among `gpus`."""

    @property
    def device_name(self) -> str:
        return self.gpus[0] if self.gpus else self.cpu


@cache
def this_machine() -> Machine:
    """The visible GPUs by NVML's names, the cores this process may use, the processor and the memory."""
    visible = visible_gpus()
    return Machine(
        gpus=tuple(gpu.name for gpu in visible.gpus),
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu_name(),
        memory_bytes=psutil.virtual_memory().total,
        gpu_memory_bytes=tuple(gpu.memory_bytes for gpu in visible.gpus),
        gpu_error=visible.error,
    )


@cache
def installed(package: str) -> str | None:
    """The version of a distribution, or None where it is not installed; asked once: it takes milliseconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(strategy_package: Mapping[str, str]) -> dict[str, Any]:
    """The record's `environment`: machine, software versions, code and load, as plain JSON values.

    What the driver does not say of GPUs has no name here; `bench/nvml.py` describes what it says.
    `strategy_package` is the distribution of the cell's strategy, and its version; empty for ours.
    """
    # An installed copy has no commit, also where the environment lies in somebody's own repository.
    commit = git(REPOSITORY, "rev-parse", "HEAD") if (REPOSITORY / ".git").exists() else None
    found = {**asdict(this_machine()), **asdict(gpu_facts())}
    return {
        **{name: value for name, value in found.items() if value is not None},
        "device_name": this_machine().device_name,
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: installed(name) for name in PACKAGES} | dict(strategy_package),
        **({"strategy_package": min(strategy_package)} if strategy_package else {}),
        "git_commit": commit,
        "git_dirty": None if commit is None else bool(git(REPOSITORY, "status", "--porcelain")),
        "sources": sources_digest(),
        "load_average": os.getloadavg()[0],
        "argv": sys.argv,
        "inherited_env": inherited_env(os.environ),
    }


def inherited_env(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that communication, CUDA and OpenMP read, sorted; no others, as they may hold secrets."""
    return {name: variables[name] for name in sorted(variables) if name.startswith(INHERITED)}


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def git(folder: Path, *arguments: str) -> str | None:
    """What git says in a folder; None where that lies in no repository, or there is no git."""
    try:
        done = subprocess.run(  # noqa: S603  fixed arguments, no shell
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],  # noqa: S607  the user's own git
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
