"""The device of a rank: its GPU or CPUs, settings of NCCL and the allocator, unused memory, end, ranges."""

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
"""For ranks that NCCL takes for hosts of their own: sockets within this host, and none of the faster ways."""


def prepare_shared_gpu(cluster: ClusterConfig) -> None:
    """Set the environment of a rank that shares its GPU: LOCAL_RANK is the GPU, each rank is a host to NCCL.

    NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected": equal hash of the host and equal
    bus id, in its init.cc); NCCL_HOSTID takes the place of the host in that hash. DeepSpeed and torch's
    device mesh take LOCAL_RANK for the number of the device. What the user has set stays as it is. To be
    called before anything reads the environment.
    """
    os.environ["LOCAL_RANK"] = str(cluster.device_index(int(os.environ["LOCAL_RANK"])))
    host = os.environ.get("NCCL_HOSTID", platform.node())
    os.environ["NCCL_HOSTID"] = f"{host}-rank-{os.environ['RANK']}"
    for name, value in SHARED_GPU_NCCL.items():
        os.environ.setdefault(name, value)


def set_allocator(env: Mapping[str, str]) -> None:
    """Hand the cell's settings to CUDA's caching allocator, before anything is allocated.

    A rank is forked from a process that has imported torch, which read these variables then: setting them in
    the rank's environment alone would change nothing. Raises RefusedError for settings that torch rejects.
    """
    for name, value in env.items():
        if name not in ALLOCATOR_VARIABLES:
            continue
        try:
            torch._C._accelerator_setAllocatorSettings(value)
        except (RuntimeError, ValueError) as error:
            said = str(error).partition("\n")[0]
            raise RefusedError(f"env.{name}={value}: torch {torch.__version__} refuses it: {said}") from error


def claim_device(cluster: ClusterConfig) -> torch.device:
    """This rank's device, made the current one on a GPU."""
    if cluster.device != "cuda":
        return torch.device(cluster.device)
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


def make_first_collective(device: torch.device) -> None:
    """All-reduce one number over all ranks and wait for it; every rank must call it.

    Where ranks cannot reach one another, this is the call that never ends.
    """
    dist.all_reduce(torch.ones(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def nccl_version(device: torch.device) -> dict[str, str]:
    """`nccl_version` of the NCCL that this process runs; nothing on a CPU."""
    return {"nccl_version": ".".join(map(str, torch.cuda.nccl.version()))} if device.type == "cuda" else {}


def release_unused(device: torch.device) -> None:
    """Give back what a GPU's caching allocator keeps of tensors that are gone; waits for the GPU.

    The next step has to ask the driver for memory again, so no step under the clock may be that one.
    """
    if device.type == "cuda":
        gc.collect()  # a cycle of Python objects holds its tensors until then
        torch.cuda.empty_cache()


def finish_together(device: torch.device, ranks: Iterable[int] | None = None) -> None:
    """Wait until the GPUs of these ranks, by default of all, are idle; each of them must call it.

    A rank that exits earlier drops kernels still in its queue, among them those its peers wait for. A
    collective cannot do this, as its own last kernel would be in the queue. Raises a kernel's error. CPU
    ranks need not wait: a call of gloo has ended when it returns.
    """
    if device.type != "cuda":
        return
    torch.cuda.synchronize(device)
    store = _get_default_store()
    store.set(f"bench/done/{dist.get_rank()}", "")
    store.wait([f"bench/done/{rank}" for rank in ranks or range(dist.get_world_size())])


class NvtxRanges:
    """What a rank does, and in it the phase of its step, for Nsight Systems: one range after another.

    Ranges are ended by number and not nested, as autograd's own thread may begin a phase.
    """

    def __init__(self) -> None:
        self._open: int | None = None

    def enter(self, phase: str, step_phase: str | None) -> None:
        """End the last range and begin `timing backward`, or `build` outside of a step."""
        if self._open is not None:
            torch.cuda.nvtx.range_end(self._open)
        self._open = torch.cuda.nvtx.range_start(" ".join(filter(None, (phase, step_phase))))


def bind_near_gpu(binding: str, device: torch.device) -> None:
    """Bind this process to CPUs near its GPU, as torchrun's --numa-binding does.

    Raises RefusedError where torch cannot: it wants the program numactl and Linux's files about the GPU.
    """
    try:
        from torch.numa import binding as numa  # a private function, which other releases may lack

        options = numa.NumaOptions(numa.AffinityMode(binding))
        bind: Callable[..., None] = numa._maybe_apply_numa_binding_to_current_process
        # torch 2.14 renamed the argument
        index = "gpu_index" if "gpu_index" in signature(bind).parameters else "device_index"
        bind(**{index: device.index}, numa_options=options)
    except Exception as error:
        raise RefusedError(
            f"cluster.numa_binding={binding}: torch cannot bind this rank: {error}; leave it out"
        ) from error


def own_cpus() -> str:
    """The CPUs that this process may run on, as `0-15,32-47`."""
    numbered = enumerate(sorted(os.sched_getaffinity(0)))
    runs = [[cpu for _, cpu in run] for _, run in groupby(numbered, lambda each: each[1] - each[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
