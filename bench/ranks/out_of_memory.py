"""Which errors mean that memory ran out, of the device or the host, and how much was requested."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_REQUESTED = re.compile(
    r"(?i:tried to allocate|unable to allocate|failed to cuda (?:m|c)alloc(?: async)?)"
    r"\s+([0-9]+(?:\.[0-9]+)?)\s*(bytes|[KMGTPE]iB)"
)


@dataclass(frozen=True, slots=True)
class Sign:
    """A pattern in an error's text that means that memory ran out."""

    pattern: re.Pattern[str]
    memory: str
    """`device` or `host`."""
    only_limited: bool = False
    """Whether it means so only in a cell whose memory is limited."""


LIMITED = True
# Searched in the whole text: TorchScript puts the allocator's line at the end of its own.
SIGNS: Sequence[Sign] = (
    Sign(re.compile(r"(CUDA|HIP) out of memory"), "device"),
    Sign(re.compile(r"(CUDA|HIP)( driver)? error: out of memory"), "device"),
    Sign(re.compile(r"C(UBLAS|UDNN|USOLVER|UFFT|USPARSE)_(STATUS_)?ALLOC_FAILED"), "device"),
    Sign(re.compile(r"CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "device"),
    Sign(re.compile(r"CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), "host"),
    Sign(re.compile(r"Cuda failure.{0,20}out of memory", re.IGNORECASE), "device"),
    Sign(re.compile(r"Failed to CUDA calloc"), "device"),
    Sign(re.compile(r"cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY"), "device"),
    Sign(re.compile(r"DefaultCPUAllocator: can't allocate memory"), "host"),
    Sign(re.compile(r"DefaultCPUAllocator: not enough memory"), "host"),
    Sign(re.compile(r"std::bad_alloc"), "host"),
    Sign(re.compile(r"Cannot allocate memory \(12\)|\[Errno 12\]"), "host"),
    Sign(re.compile(r"cannot allocate memory for thread-local data"), "host"),
    # A thread's stack counts as data. One that cannot be made may end in C++'s abort.
    Sign(re.compile(r"can't start new thread|Thread creation failed|pthread_create"), "host", LIMITED),
    Sign(re.compile(r"terminate called without an active exception"), "host", LIMITED),
    Sign(re.compile(r"Resource temporarily unavailable|\[Errno 11\]"), "host", LIMITED),
    # oneDNN, where there is no room for the code it generates or for its scratchpad.
    Sign(re.compile(r"could not (create|execute) a (primitive|memory)"), "host", LIMITED),
)
KINDS = {"OutOfMemoryError": "device", "MemoryError": "host"}


def memory_of_text(text: str, *, limited: bool = False) -> str | None:
    """`device` or `host` where this text means that its memory ran out, else None.

    The word "memory" alone means nothing. `limited`: the cell had a memory limit.
    """
    found = (
        sign.memory for sign in SIGNS if (limited or not sign.only_limited) and sign.pattern.search(text)
    )
    return next(found, None)


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
