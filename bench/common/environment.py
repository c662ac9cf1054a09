"""What machine and software ran a cell, and whether another ran with the same; never touches CUDA."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path
from typing import Any

import psutil
from msgspec import Struct

from bench.common.nvml import VisibleGpus, gpu_facts, visible_gpus
from bench.common.rules import Count, Whole

REPOSITORY = Path(__file__).resolve().parents[2]
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
INHERITED = (
    "ATEN_", "CUDA_", "DS_", "GLOO_", "NCCL_", "NVIDIA_TF32_OVERRIDE", "OMP_", "ONEDNN_", "PYTORCH_",
    "TORCH_BLAS", "TORCH_CUDNN", "TORCH_NCCL_",
)  # fmt: skip
"""Prefixes of variables that change what a cell does and that a shell may have set before the command."""
OWN_VARIABLES = frozenset({"DS_ACCELERATOR", "DS_LOG_LEVEL", "PYTORCH_NVML_BASED_CUDA_CHECK"})
"""Variables with such a prefix that the fork server sets itself (bench/run/node/server.py)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The devices at hand."""

    gpus: tuple[str, ...]
    cores: int
    cpu: str
    memory_bytes: int
    gpu_memory_bytes: tuple[int, ...] = ()
    """What each of `gpus` has in all, as NVML counts it; less is left for tensors."""
    gpu_capabilities: tuple[str, ...] = ()
    """The compute capability of each of `gpus`: `9.0`."""
    gpu_error: str | None = None
    """Why a GPU that is there is not among `gpus`, and a way out."""

    @property
    def device_name(self) -> str:
        return self.gpus[0] if self.gpus else self.cpu


@cache
def this_machine() -> Machine:
    """The visible GPUs by NVML's names, the cores this process may use, the processor and the memory."""
    visible = visible_gpus()
    unusable = visible.error or (_unusable_by_torch(visible) if visible.names else None)
    gpus = VisibleGpus() if unusable else visible
    return Machine(
        gpus=gpus.names,
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu_name(),
        memory_bytes=psutil.virtual_memory().total,
        gpu_memory_bytes=gpus.memory_bytes,
        gpu_capabilities=gpus.capabilities,
        gpu_error=unusable,
    )


def _unusable_by_torch(visible: VisibleGpus) -> str | None:
    """Why torch cannot use the GPUs that the driver shows, and a way out; None where it can, or may.

    A driver runs programs of its own CUDA's major version, and of older ones (NVIDIA's "CUDA Compatibility").
    """
    built_for, newest = torch_cuda(), visible.driver_cuda
    if built_for and (newest is None or newest[0] >= int(built_for.partition(".")[0])):
        return None
    newest_label = "" if newest is None else f", its driver runs CUDA {newest[0]}.{newest[1]} at the newest"
    return (
        f"torch {installed('torch')} is built {f'for CUDA {built_for}' if built_for else 'without CUDA'} and"
        f" cannot use {visible.names[0]}{newest_label}; install a build of torch for the driver's CUDA"
        " (docs/gpus.md), or update the driver"
    )


@cache
def torch_cuda() -> str:
    """The CUDA that torch is built for, `13.0`; empty where it is built without.

    From torch's own file: to import torch takes seconds.
    """
    package = find_spec("torch")
    assert package is not None
    assert package.origin is not None
    return run_path(os.fspath(Path(package.origin).with_name("version.py")))["cuda"] or ""


@cache
def installed(package: str) -> str | None:
    """The version of a distribution, or None where it is not installed; asked once: it takes milliseconds."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Environment(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Machine, software and code that made a record. A field with a default is left out where it has that."""

    gpus: list[str]
    cores: Count | None
    """CPU cores that the launcher may use."""
    cpu: str | None
    memory_bytes: Whole | None
    gpu_memory_bytes: list[Whole]
    """Memory of each GPU in all, as NVML counts it; less is left for tensors."""
    gpu_capabilities: list[str]
    """Compute capability of each GPU: `9.0`."""
    gpu_error: str | None = None
    """Reason why a GPU that is there is not among `gpus`, and a way out."""
    gpu_driver: str | None = None
    gpu_power_limit_w: list[float] | None = None
    gpu_temperature_c: list[float] | None = None
    gpu_nvlinks: list[int] | None = None
    """Active NVLinks of each GPU."""
    gpu_topology: dict[str, str] | None = None
    """Nearest common ancestor of each pair of GPUs, in the words of nvidia-smi."""
    gpu_p2p: dict[str, str] | None = None
    """Peer access of each pair of GPUs."""
    device_name: str | None
    """First GPU, or the CPU without one."""
    os: str | None
    python: str | None
    packages: dict[str, str | None]
    """Versions of installed distributions; null for one that is not installed."""
    strategy_package: str | None = None
    """Distribution of the cell's strategy; null for ours."""
    git_commit: str | None
    git_dirty: bool | None
    sources: str | None
    """Digest of the source files."""
    load_average: float | None
    """Load average of the machine when the record was made."""
    argv: list[str]
    """Words of the command, or of the observed script."""
    inherited_env: dict[str, str]
    """Variables that change what a cell does and that were set before the command."""
    nccl_version: str | None = None
    cpu_products: str | None = None
    """Dtype in which a CPU computes products of linear layers."""
    script_commit: str | None = None
    """Commit of the observed script's repository."""
    script_dirty: bool | None = None
    nodes: list[dict[str, Any]] = []
    """Host, address and differences from the first node, for ranks on other machines."""


def describe(strategy_package: Mapping[str, str]) -> Environment:
    """Return the record's `environment` of this process.

    `strategy_package` is the distribution of the cell's strategy, and its version; empty for ours.
    """
    # An installed copy has no commit, also where the environment lies in somebody's own repository.
    commit = git(REPOSITORY, "rev-parse", "HEAD") if (REPOSITORY / ".git").exists() else None
    machine: dict[str, Any] = {
        name: [*value] if isinstance(value, tuple) else value
        for name, value in asdict(this_machine()).items()
    }
    return Environment(
        **machine,
        **gpu_facts(),
        device_name=this_machine().device_name,
        os=platform.platform(),
        python=platform.python_version(),
        packages={name: installed(name) for name in PACKAGES} | dict(strategy_package),
        strategy_package=min(strategy_package, default=None),
        git_commit=commit,
        git_dirty=None if commit is None else bool(git(REPOSITORY, "status", "--porcelain")),
        sources=sources_digest(),
        load_average=os.getloadavg()[0],
        argv=[*sys.argv],
        inherited_env=inherited_env(os.environ),
    )


def inherited_env(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that communication, CUDA, OpenMP and CPU kernels read; no others, as they may hold secrets."""
    inherited = (name for name in sorted(variables) if name.startswith(INHERITED))
    return {name: variables[name] for name in inherited if name not in OWN_VARIABLES}


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


def departures(then: Environment, here: Environment, packages: Collection[str] | None) -> list[str]:
    """What of a record's environment is not as it is `here`: code, device, torch and these other packages.

    Each in words, `other code (1a2b3c4-0f1e2d, here 5d6e7f8-9a8b7c)`. `packages` is None for a prediction,
    which is arithmetic and depends on code alone. Unknown code or an unknown device is not the same as any; a
    package that neither has is.
    """
    pairs = [("code", code_label(then), code_label(here))]
    if packages is not None:
        pairs.append(("device", then.device_name, here.device_name))
    found = [
        (what, before or "unknown", now or "unknown")
        for what, before, now in pairs
        if before is None or before != now
    ]
    names = [] if packages is None else ["torch", *sorted({*packages} - {"torch"})]
    pairs = [(name, then.packages.get(name), here.packages.get(name)) for name in names]
    found += [(name, before or "none", now or "none") for name, before, now in pairs if before != now]
    return [f"other {what} ({before}, here {now})" for what, before, now in found]


def code_label(environment: Environment) -> str | None:
    """`1a2b3c4-0f1e2d`: the commit and the digest of the sources, or the one of them that is known."""
    commit, sources = environment.git_commit, environment.sources
    parts = [str(commit)[:7]] if commit else []
    return "-".join([*parts, *([str(sources)[:6]] if sources else [])]) or None


@cache
def sources_digest() -> str:
    """Twelve hex digits of every source file of `bench/` and of the figures for predictions.

    All other choices of conf/ are in a cell's configuration. Computed once: an edit made while a sweep runs
    is not what its warm processes have imported. A plugin counts by its version, which `packages` has.
    """
    return digest_of(REPOSITORY)


def digest_of(tree: Path) -> str:
    """A digest of the content of a tree's sources and hardware files, wherever it lies."""
    whole = hashlib.sha256()
    for path in sorted([*(tree / "bench").rglob("*.py"), *(tree / "conf" / "hardware").glob("*.yaml")]):
        content = path.read_bytes()
        whole.update(f"{path.relative_to(tree)}\n{len(content)}\n".encode())
        whole.update(content)
    return whole.hexdigest()[:12]
