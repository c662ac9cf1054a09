"""Memory limit of a cell, which makes out-of-memory errors testable on any machine.

On a CPU the limit is the soft RLIMIT_DATA, because RLIMIT_AS would also count unused address space. Memory
that a rank has allocated before, when it first used every library that the cell needs, does not count. Freed
tensors return their memory to the system at once, so that it does not count either.
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
"""Memory in addition to the limit, for bytes that are not in tensors. oneDNN generates about 1 MiB of code
for every shape."""
_WARM_UP_NUMBERS = 2**20


def process_bytes(field: str) -> int:
    """Return a field of /proc/self/status such as `VmRSS` or `VmData` in bytes; 0 on other systems."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    lines = (line.split() for line in status.splitlines())
    return next((int(line[1]) * KIB for line in lines if line[0] == f"{field}:"), 0)


def reset_peak_resident_bytes() -> bool:
    """Return freed memory to the system and set `VmHWM` to `VmRSS`; return False if this is not allowed."""
    try:
        with Path("/proc/self/clear_refs").open("w") as file:
            ctypes.CDLL(None).malloc_trim(0)
            file.write("5")
    except OSError:
        return False
    return True


def set_memory_limit(limit_gib: float, device: torch.device) -> int:
    """Make allocations beyond a limit fail; every rank must call this once it has used all libraries.

    Returns:
        The bytes of the process that the limit does not count. On a CPU these are its memory now, and some
        room for generated code; on a GPU the result is 0.
    """
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_gib * GIB / total_bytes), device)
        return 0
    # Start torch's threads now: their stacks, 8 MB each, must not count as the cell's memory.
    torch.ones(_WARM_UP_NUMBERS).add_(1)
    _keep_small_blocks_only()
    dist.barrier()
    base_bytes = process_bytes("VmData") + ROOM_BYTES
    _set_soft_limit(base_bytes + round(limit_gib * GIB))
    return base_bytes


@contextmanager
def without_memory_limit() -> Iterator[None]:
    """Lift the limit inside the context, for code that is no part of the cell, such as a check.

    Memory that this code keeps, such as generated code, is added to the limit afterwards. Memory that it
    frees is returned to the system, so that the cell cannot use it.
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


def used_limit_bytes(limit_gib: float) -> int | None:
    """Return the bytes of its limit that this CPU rank uses now; None if no limit is in force."""
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
    """Lift the limit of a CPU rank, without allocating, so that an error handler can allocate."""
    _set_soft_limit(resource.getrlimit(resource.RLIMIT_DATA)[1])


def _set_soft_limit(size_bytes: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    resource.setrlimit(resource.RLIMIT_DATA, (size_bytes, hard))


def _keep_small_blocks_only() -> None:
    """Make malloc keep only small freed blocks and return larger ones to the system; see mallopt(3).

    Memory that has been freed before this call is returned as well.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, _SMALL_BLOCK_BYTES)
    libc.mallopt(_M_TRIM_THRESHOLD, 2 * _SMALL_BLOCK_BYTES)
    libc.malloc_trim(0)
