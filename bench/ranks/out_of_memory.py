"""Which errors mean that memory ran out, of the device or the host, and how much was requested."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_REQUESTED = re.compile(
    r"(?i:tried to allocate|unable to allocate|failed to cuda (?:m|c)alloc(?: async)?)"
    r"\s+([0-9]+(?:\.[0-9]+)?)\s*(bytes|[KMGTPE]iB)"
)


# Searched in the whole text: TorchScript puts the allocator's line at the end of its own.
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
    # A thread's stack counts as data. One that cannot be made may end in C++'s abort.
    r"can't start new thread|Thread creation failed|pthread_create",
    r"terminate called without an active exception",
    r"Resource temporarily unavailable|\[Errno 11\]",
    # oneDNN, where there is no room for the code it generates or for its scratchpad.
    r"could not (create|execute) a (primitive|memory)",
)
"""Of the host's memory, only in a cell whose memory is limited."""
KINDS = {"OutOfMemoryError": "device", "MemoryError": "host"}


def memory_of_text(text: str, *, limited: bool = False) -> str | None:
    """`device` or `host` where this text means that its memory ran out, else None.

    The word "memory" alone means nothing. `limited`: the cell had a memory limit.
    """
    if any(re.search(sign, text) for sign in DEVICE_SIGNS):
        return "device"
    signs = (*HOST_SIGNS, *(LIMITED_SIGNS if limited else ()))
    return "host" if any(re.search(sign, text) for sign in signs) else None


def memory_of_error(error: BaseException, *, limited: bool = False) -> str | None:
    """Which memory an exception says was used up, by its type or text; None where it says nothing of it."""
    kinds = (KINDS[cls.__name__] for cls in type(error).__mro__ if cls.__name__ in KINDS)
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return "host"
    return next(kinds, None) or memory_of_text(str(error), limited=limited)


def root_cause(error: BaseException, *, limited: bool = False) -> tuple[BaseException, str | None]:
    """The error, or the one that caused it by running out of memory, and `device` or `host`.

    A library's cleanup may fail in its own way once an allocation has failed.
    """
    for each in _chain(error):
        memory = memory_of_error(each, limited=limited)
        if memory is not None:
            return each, memory
    return error, None


def requested_bytes(text: str) -> int | None:
    """How many bytes the failed allocation requested; None where the text does not say."""
    match = _REQUESTED.search(text)
    if match is None:
        return None
    unit_bytes: int = 1024 ** _UNITS.index(match[2])
    return round(float(match[1]) * unit_bytes)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
