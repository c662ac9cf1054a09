"""Device of a rank: GPU or CPUs, NCCL's environment, the allocator, synchronization and NVTX ranges."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from bench.config import ALLOCATOR_VARIABLES, ClusterConfig
from bench.ranks.log import RefusedError

SHARED_GPU_NCCL: Mapping[str, str] = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
}
"""NCCL settings for ranks that share a GPU. They leave only sockets on the loopback interface, because NCCL
takes every such rank for a host (see `prepare_shared_gpu`)."""


def prepare_shared_gpu(cluster: ClusterConfig) -> None:
    """Set the environment variables of a rank that shares its GPU with other ranks.

    NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected": init.cc compares a hash of the
    host and the bus id). NCCL_HOSTID replaces the host in that hash, so that every rank gets a different one.
    LOCAL_RANK becomes the index of the GPU, because DeepSpeed and torch's device mesh use it as such.
    Variables of SHARED_GPU_NCCL that the user has set stay. Call this before any library reads the
    environment.
    """
    os.environ["LOCAL_RANK"] = str(cluster.device_index(int(os.environ["LOCAL_RANK"])))
    host = os.environ.get("NCCL_HOSTID", platform.node())
    os.environ["NCCL_HOSTID"] = f"{host}-rank-{os.environ['RANK']}"
    for name, value in SHARED_GPU_NCCL.items():
        os.environ.setdefault(name, value)


def set_allocator(env: Mapping[str, str]) -> None:
    """Apply the cell's settings to CUDA's caching allocator; call this before anything is allocated.

    torch reads the variables when it is imported, which the fork server does before it forks a rank. Setting
    them in the rank's environment would therefore have no effect.

    Args:
        env: Environment variables of the cell, of which only ALLOCATOR_VARIABLES matter here.

    Raises:
        RefusedError: If torch rejects a setting.
    """
    for name, value in env.items():
        if name not in ALLOCATOR_VARIABLES:
            continue
        try:
            torch._C._accelerator_setAllocatorSettings(value)
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise RefusedError(
                f"env.{name}={value}: torch {torch.__version__} rejects it: {reason}"
            ) from error


def claim_device(cluster: ClusterConfig) -> torch.device:
    """Return the device of this rank. A GPU becomes the current device of the process."""
    if cluster.device != "cuda":
        return torch.device(cluster.device)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def make_first_collective(device: torch.device) -> None:
    """All-reduce one number over all ranks and wait for the result; every rank must call this.

    The call does not return if the ranks cannot reach one another.
    """
    dist.all_reduce(torch.ones(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def nccl_version(device: torch.device) -> dict[str, str]:
    """Return the field `nccl_version` of the environment; empty on a CPU."""
    return {"nccl_version": ".".join(map(str, torch.cuda.nccl.version()))} if device.type == "cuda" else {}


def release_unused(device: torch.device) -> None:
    """Return unused memory of a GPU's caching allocator to the driver, and wait for the GPU.

    The next step must allocate from the driver again and is slower, so it must not be a timed step.
    """
    if device.type == "cuda":
        gc.collect()  # frees tensors in reference cycles
        torch.cuda.empty_cache()


def finish_together(device: torch.device, ranks: Iterable[int] | None = None) -> None:
    """Wait until the GPUs of several ranks are idle; every one of these ranks must call this.

    A rank that exits while kernels are queued on its GPU drops them, and other ranks may wait for one of
    them. A collective cannot wait for the end of the queue, because its own last kernel is in the queue. CPU
    ranks return at once, because gloo queues nothing. An error of an earlier kernel is raised here.

    Args:
        device: Device of this rank.
        ranks: Ranks to wait for; None for all.
    """
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    store = _get_default_store()
    store.set(f"bench/done/{dist.get_rank()}", "")
    store.wait([f"bench/done/{rank}" for rank in ranks or range(dist.get_world_size())])


class NvtxRanges:
    """NVTX ranges that name a rank's phase and the phase of its step in Nsight Systems.

    A range ends where the next begins. Ranges are ended by number and are not nested on a thread's stack,
    because a thread of autograd may begin a phase that another thread ends.
    """

    def __init__(self) -> None:
        self._open: int | None = None

    def enter(self, phase: str, step_phase: str | None) -> None:
        """End the current range and begin one named `timing backward`, or `build` outside of a step."""
        if self._open is not None:
            torch.cuda.nvtx.range_end(self._open)
        self._open = torch.cuda.nvtx.range_start(" ".join(filter(None, (phase, step_phase))))


def bind_near_gpu(binding: str, device: torch.device) -> None:
    """Bind this process to CPUs near its GPU, as torchrun's --numa-binding does.

    Args:
        binding: One of NUMA_BINDINGS.
        device: GPU of this rank.

    Raises:
        RefusedError: If torch cannot bind the process. It needs the program numactl and Linux's files about
            the GPU.
    """
    try:
        from torch.numa import binding as numa  # other releases of torch may lack its private function

        options = numa.NumaOptions(numa.AffinityMode(binding))
        bind: Callable[..., None] = numa._maybe_apply_numa_binding_to_current_process
        # torch 2.14 renamed the argument
        index = "gpu_index" if "gpu_index" in signature(bind).parameters else "device_index"
        bind(**{index: device.index}, numa_options=options)
    except Exception as error:
        raise RefusedError(
            f"cluster.numa_binding={binding}: torch cannot bind this rank: {error}; leave it out"
        ) from error


def allowed_cpus() -> str:
    """Return the CPUs that this process may run on, for example `0-15,32-47`."""
    numbered = enumerate(sorted(os.sched_getaffinity(0)))
    runs = [[cpu for _, cpu in run] for _, run in groupby(numbered, lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
