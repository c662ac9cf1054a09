"""Which CPUs a rank runs on."""

from __future__ import annotations

import os
from collections.abc import Callable
from inspect import signature
from itertools import groupby

import torch

from bench.ranks.log import RefusedError


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
