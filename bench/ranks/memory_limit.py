"""A limit on what a cell may allocate, so that out of memory can be tried on any machine.

On the CPU it is the soft RLIMIT_DATA, counted from what a rank holds once it has used every library that the
cell needs; RLIMIT_AS would count address space that is not used. What a freed tensor took goes straight back,
so that nothing but tensors comes and goes in large blocks.
"""

from __future__ import annotations

import ctypes
import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

from bench.common.labels import GIB, KIB, MIB

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SMALL_BLOCK_BYTES = 64 * KIB
ROOM_BYTES = 24 * MIB
"""For what a step takes beside tensors: oneDNN generates code for every shape, about 1 MiB of it."""
_WARM_UP_NUMBERS = 2**20


def process_bytes(field: str) -> int:
    """A figure of this process such as `VmRSS`, `VmHWM` or `VmData`, in bytes; Linux only, else 0."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines())
    return next((int(line[1]) * KIB for line in lines if line[0] == f"{field}:"), 0)


def set_memory_limit(limit_gib: float, device: torch.device) -> int:
    """Make allocations fail beyond the limit; every rank must call it once it has used what it needs.

    Returns the bytes from which the limit counts: on the CPU what the rank holds now, with some room for
    code, on a GPU none.
    """
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total_bytes), device)
        return 0
    # Threads that start with the first use are not the cell's own: 8 MB of stack each.
    torch.ones(_WARM_UP_NUMBERS).add_(1)
    _keep_small_blocks_only()
    dist.barrier()
    base_bytes = process_bytes("VmData") + ROOM_BYTES
    _set_soft_limit(base_bytes + round(limit_gib * GIB))
    return base_bytes


@contextmanager
def without_memory_limit() -> Iterator[None]:
    """Around what is no part of the cell, such as a check that needs more than the cell may.

    What it leaves behind, such as generated code, does not count as the cell's. What it leaves free is given
    back: kept, it would be the cell's to use.
    """
    if torch.cuda.is_initialized():
        with _without_gpu_limit():
            yield
        return
    limit = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if limit == resource.RLIM_INFINITY:
        yield
        return
    before_bytes = process_bytes("VmData")
    lift_memory_limit()
    yield
    _keep_small_blocks_only()
    _set_soft_limit(limit + max(0, process_bytes("VmData") - before_bytes))


def held_bytes(limit_gib: float) -> int | None:
    """How much of its limit this rank uses on the CPU now; None where no limit holds at the moment."""
    soft = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if soft == resource.RLIM_INFINITY:
        return None
    return max(0, round(limit_gib * GIB) - (soft - process_bytes("VmData")))


@contextmanager
def _without_gpu_limit() -> Iterator[None]:
    fraction = torch.cuda.get_per_process_memory_fraction()
    if fraction == 1:
        yield
        return
    torch.cuda.set_per_process_memory_fraction(1.0)
    yield
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(fraction)


def lift_memory_limit() -> None:
    """Give an error's handler room on the CPU again; allocates nothing itself."""
    _set_soft_limit(resource.getrlimit(resource.RLIMIT_DATA)[1])


def _set_soft_limit(size_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, hard))


def _keep_small_blocks_only() -> None:
    """Larger ones have a mapping of their own from now on, and go with it when freed; see mallopt(3)."""
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _SMALL_BLOCK_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * _SMALL_BLOCK_BYTES)
    libc.malloc_trim(0)
