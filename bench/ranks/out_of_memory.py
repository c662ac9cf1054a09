"""Recognition of out-of-memory errors of the device or the host, and of the requested size."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_REQUESTED = re.compile(
    r"(?i:tried to allocate|unable to allocate|failed to cuda (?:m|c)alloc(?: async)?)"
    r"\s+([0-9]+(?:\.[0-9]+)?)\s*(bytes|[KMGTPE]iB)"
)


# The signs are searched in the whole text: TorchScript puts the allocator's line at the end of its message.
DEVICE_SIGNS = (
    r"(CUDA|HIP) out of memory",
    r"(CUDA|HIP)( driver)? error: out of memory",
    r"C(UBLAS|UDNN|USOLVER|UFFT|USPARSE)_(STATUS_)?ALLOC_FAILED",
    r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    r"(?i:Cuda failure.{0,20}out of memory)",
    r"Failed to CUDA calloc",
    r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY",
)
HOST_SIGNS = (
    r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
    r"DefaultCPUAllocator: can't allocate memory",
    r"DefaultCPUAllocator: not enough memory",
    r"std::bad_alloc",
    r"Cannot allocate memory \(12\)|\[Errno 12\]",
    r"cannot allocate memory for thread-local data",
)
LIMITED_SIGNS = (
    # A thread's stack counts as data. A thread that cannot be created may end in C++'s abort.
    r"can't start new thread|Thread creation failed|pthread_create",
    r"terminate called without an active exception",
    r"Resource temporarily unavailable|\[Errno 11\]",
    # oneDNN has no room for generated code or for its scratchpad.
    r"could not (create|execute) a (primitive|memory)",
)
"""Texts that mean exhausted host memory only in a cell with a memory limit."""
MEMORY_OF_TYPE = {"OutOfMemoryError": "device", "MemoryError": "host"}
"""Memory that is exhausted if an exception of this type is raised."""


def exhausted_memory_by_text(text: str, *, limited: bool = False) -> str | None:
    """Return which memory is exhausted by the text of an error.

    The word "memory" alone is no sign.

    Args:
        text: Message or log.
        limited: Whether the cell had a memory limit.

    Returns:
        `device`, `host`, or None if the text does not mean exhausted memory.
    """
    if any(re.search(sign, text) for sign in DEVICE_SIGNS):
        return "device"
    signs = (*HOST_SIGNS, *(LIMITED_SIGNS if limited else ()))
    return "host" if any(re.search(sign, text) for sign in signs) else None


def exhausted_memory(error: BaseException, *, limited: bool = False) -> str | None:
    """Return which memory is exhausted by the type or the text of an exception.

    The result is `device`, `host` or None, as from `exhausted_memory_by_text`.
    """
    names = (cls.__name__ for cls in type(error).__mro__)
    memories = (MEMORY_OF_TYPE[name] for name in names if name in MEMORY_OF_TYPE)
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "host"
    return next(memories, None) or exhausted_memory_by_text(str(error), limited=limited)


def root_cause(error: BaseException, *, limited: bool = False) -> tuple[BaseException, str | None]:
    """Return the out-of-memory error in the chain of causes of an exception, and which memory is exhausted.

    Without such an error the result is the exception itself and None. The chain matters because the cleanup
    of a library may raise another error after an allocation has failed.
    """
    for cause in _chain(error):
        memory = exhausted_memory(cause, limited=limited)
        if memory is not None:
            return cause, memory
    return error, None


def requested_bytes(text: str) -> int | None:
    """Return the number of bytes that the failed allocation requested; None if the text does not state it."""
    match = _REQUESTED.search(text)
    if match is None:
        return None
    unit_bytes: int = 1024 ** _UNITS.index(match[2])
    return round(float(match[1]) * unit_bytes)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
