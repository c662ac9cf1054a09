"""Machine, software and code that a record was made with, and their differences; never initializes CUDA."""

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
from bench.common.rules import NonNegativeInt, PositiveInt

REPOSITORY = Path(__file__).resolve().parents[2]
"""Root of the checkout, or the folder that contains `bench` in an installed copy."""
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
    "trl",
    "nvidia-nccl-cu13",
    "nvidia-nccl-cu12",
    "nvidia-cudnn-cu13",
    "nvidia-cudnn-cu12",
)
"""Distributions whose versions a record stores."""
CUDNN_OF_SDPA = (9, 15, 1)
"""First cuDNN that torch's `scaled_dot_product_attention` prefers to flash attention; earlier ones are wrong
for lengths that 128 does not divide (sdp_utils.cpp)."""
CUDA_PACKAGES = tuple(name for name in PACKAGES if name.startswith("nvidia-"))
"""Distributions that only ranks on GPUs use."""
INHERITED = (
    "ATEN_", "CUDA_", "DS_", "GLOO_", "NCCL_", "NVIDIA_TF32_OVERRIDE", "OMP_", "ONEDNN_", "PYTORCH_",
    "TORCH_BLAS", "TORCH_CUDNN", "TORCH_NCCL_",
)  # fmt: skip
"""Prefixes of environment variables that change what a cell does and that the user's shell may have set."""
FORK_SERVER_VARIABLES = frozenset({"DS_ACCELERATOR", "DS_LOG_LEVEL", "PYTORCH_NVML_BASED_CUDA_CHECK"})
"""Variables with a prefix of `INHERITED` that the fork server sets (bench/run/node/server.py)."""


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs, CPU and memory of this machine."""

    gpus: tuple[str, ...]
    """Names of the visible GPUs that torch can use."""
    cores: int
    """CPU cores that this process may use."""
    cpu: str
    memory_bytes: int
    gpu_memory_bytes: tuple[int, ...] = ()
    """Total memory of each GPU as NVML reports it; less of it is available for tensors."""
    gpu_capabilities: tuple[str, ...] = ()
    """Compute capability of each GPU, for example `9.0`."""
    gpu_error: str | None = None
    """Reason why this machine's GPUs cannot be used, with a way out; None if they can, or if it has none."""
    cudnn_fault: str | None = None
    """Reason why `kernel=auto` is not cuDNN on this machine's GPUs; None if it may be."""

    @property
    def device_name(self) -> str:
        """Name of the first GPU, or of the CPU without one."""
        return self.gpus[0] if self.gpus else self.cpu


@cache
def this_machine() -> Machine:
    """Return the GPUs, CPU and memory of this machine."""
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
        cudnn_fault=_old_cudnn() if gpus.names else None,
    )


def _old_cudnn() -> str | None:
    """Return that the installed cuDNN is older than CUDNN_OF_SDPA; None if not, or if none is installed."""
    version = installed_version(f"nvidia-cudnn-cu{torch_cuda().partition('.')[0]}")
    if version is None or tuple(map(int, version.split(".")[:3])) >= CUDNN_OF_SDPA:
        return None
    return (
        f"cuDNN {version} is older than {'.'.join(map(str, CUDNN_OF_SDPA))}, from which on torch prefers it"
    )


def _unusable_by_torch(visible: VisibleGpus) -> str | None:
    """Return why torch cannot use the visible GPUs, with a way out; None if it probably can.

    A driver runs programs that are built for the major version of its CUDA or an older one (NVIDIA's "CUDA
    Compatibility").
    """
    built_for, newest = torch_cuda(), visible.driver_cuda
    if built_for and (newest is None or newest[0] >= int(built_for.partition(".")[0])):
        return None
    driver = "" if newest is None else f", whose driver supports CUDA {newest[0]}.{newest[1]} and older"
    build = f"for CUDA {built_for}" if built_for else "without CUDA"
    return (
        f"torch {installed_version('torch')} is built {build} and cannot use {visible.names[0]}{driver};"
        " install a build of torch for the driver's CUDA (docs/gpus.md), or update the driver"
    )


@cache
def torch_cuda() -> str:
    """Return the CUDA version that torch is built for, for example `13.0`; empty for a build without CUDA.

    It is read from torch's `version.py`, because importing torch takes seconds.
    """
    package = find_spec("torch")
    assert package is not None
    assert package.origin is not None
    return run_path(os.fspath(Path(package.origin).with_name("version.py")))["cuda"] or ""


@cache
def installed_version(package: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed.

    The version is cached, as reading it takes milliseconds.
    """
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


class Environment(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Machine, software and code that a record was made with.

    A field is not stored if it has its default value.
    """

    gpus: list[str]
    cores: PositiveInt | None
    """CPU cores that the launcher may use."""
    cpu: str | None
    memory_bytes: NonNegativeInt | None
    gpu_memory_bytes: list[NonNegativeInt]
    """Total memory of each GPU as NVML reports it; less of it is available for tensors."""
    gpu_capabilities: list[str]
    """Compute capability of each GPU, for example `9.0`."""
    gpu_error: str | None = None
    """Reason why a GPU of this machine cannot be used, with a way out."""
    cudnn_fault: str | None = None
    """Reason why `kernel=auto` is not cuDNN on this machine's GPUs."""
    gpu_driver: str | None = None
    gpu_power_limit_w: list[float] | None = None
    gpu_temperature_c: list[float] | None = None
    gpu_nvlinks: list[int] | None = None
    """Active NVLinks of each GPU."""
    gpu_topology: dict[str, str] | None = None
    """Nearest common ancestor of each pair of GPUs in the PCIe topology, by the names of nvidia-smi."""
    gpu_p2p: dict[str, str] | None = None
    """Peer access of each pair of GPUs: `NVLink`, `PCIe`, or why there is none."""
    device_name: str | None
    """Name of the first GPU, or of the CPU without one."""
    os: str | None
    python: str | None
    packages: dict[str, str | None]
    """Versions of installed distributions; null for one that is not installed."""
    strategy_package: str | None = None
    """Distribution of the cell's strategy; null for a strategy of this project."""
    git_commit: str | None
    git_dirty: bool | None
    sources: str | None
    """Digest of the project's source files."""
    load_average: float | None
    """Load average of the machine when the record was made."""
    argv: list[str]
    """`sys.argv` of the command, or of the observed script."""
    inherited_env: dict[str, str]
    """Environment variables that change what a cell does and that were set before the command started."""
    nccl_version: str | None = None
    cpu_products: str | None = None
    """Dtype in which CPU ranks compute the matrix products of linear layers."""
    nodes: list[dict[str, Any]] = []
    """Host and address of each node, and its differences from the first; empty for one machine."""


def describe_environment(strategy_package: Mapping[str, str]) -> Environment:
    """Return the environment of this process, which a record stores.

    Args:
        strategy_package: Distribution of the cell's strategy with its version; empty for a strategy of this
            project.
    """
    # An installed copy has no commit, even if the user's virtual environment is inside a repository.
    commit = git_output(REPOSITORY, "rev-parse", "HEAD") if (REPOSITORY / ".git").exists() else None
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
        packages={name: installed_version(name) for name in PACKAGES} | dict(strategy_package),
        strategy_package=min(strategy_package, default=None),
        git_commit=commit,
        git_dirty=None if commit is None else bool(git_output(REPOSITORY, "status", "--porcelain")),
        sources=sources_digest(),
        load_average=os.getloadavg()[0],
        argv=[*sys.argv],
        inherited_env=inherited_env(os.environ),
    )


def inherited_env(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that communication, CUDA, OpenMP and CPU kernels read.

    Other variables may contain secrets and are left out.
    """
    names = (name for name in sorted(variables) if name.startswith(INHERITED))
    return {name: variables[name] for name in names if name not in FORK_SERVER_VARIABLES}


def _cpu_name() -> str:
    try:
        match = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        match = None
    return match[1].strip() if match else platform.processor() or platform.machine()


def git_output(folder: Path, *arguments: str) -> str | None:
    """Return the output of a git command in a folder; None outside of a repository or without git."""
    try:
        process = subprocess.run(  # noqa: S603  fixed arguments, no shell
            ["git", "--no-optional-locks", "-C", str(folder), *arguments],  # noqa: S607  the user's own git
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return process.stdout.strip()


def environment_changes(
    recorded: Environment, current: Environment, packages: Collection[str] | None
) -> list[str]:
    """Return the differences between two environments in code, device, torch and some other packages.

    A difference reads `other code (1a2b3c4-0f1e2d, here 5d6e7f8-9a8b7c)`. Code and a device that the record
    does not state count as different. A package that both environments lack counts as equal.

    Args:
        recorded: Environment of a record.
        current: Environment of this process.
        packages: Distributions to compare; None for a prediction, which depends on code alone.
    """
    pairs = [("code", code_label(recorded), code_label(current))]
    if packages is not None:
        pairs.append(("device", recorded.device_name, current.device_name))
    differences = [
        (subject, old or "unknown", new or "unknown")
        for subject, old, new in pairs
        if old is None or old != new
    ]
    names = [] if packages is None else ["torch", *sorted({*packages} - {"torch"})]
    pairs = [(name, recorded.packages.get(name), current.packages.get(name)) for name in names]
    differences += [(name, old or "none", new or "none") for name, old, new in pairs if old != new]
    return [f"other {subject} ({old}, here {new})" for subject, old, new in differences]


def code_label(environment: Environment) -> str | None:
    """Return the start of the commit and of the sources' digest, for example `1a2b3c4-0f1e2d`.

    An unknown part is left out. The result is None if both are unknown.
    """
    commit, sources = environment.git_commit, environment.sources
    parts = [str(commit)[:7]] if commit else []
    return "-".join([*parts, *([str(sources)[:6]] if sources else [])]) or None


@cache
def sources_digest() -> str:
    """Return the digest of this project's source and hardware files.

    Other files of conf/ are left out, because a cell contains their settings. The digest is computed once,
    because the processes of a running sweep do not import later edits.
    """
    return tree_digest(REPOSITORY)


def tree_digest(tree: Path) -> str:
    """Return twelve hex digits of the sources in `bench` and the files in `conf/hardware` of a folder."""
    digest = hashlib.sha256()
    for path in sorted([*(tree / "bench").rglob("*.py"), *(tree / "conf" / "hardware").glob("*.yaml")]):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(tree)}\n{len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:12]
