"""Recognition of errors that mean exhausted memory or another resource, and of the requested size."""

from __future__ import annotations

import linecache
import re
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_REQUESTED = re.compile(
    r"(?i:tried to allocate|unable to allocate|failed to cuda (?:[mc]|host )alloc(?: async)?)"
    r"\s+([0-9]+(?:\.[0-9]+)?)\s*(bytes|[KMGTPE]iB)"
)


@dataclass(frozen=True, slots=True)
class Resource:
    """Resource that an error says is exhausted."""

    memory: str | None
    """Memory that the cell ran out of; None if the cell ends with status `error`."""
    advice: str | None = None
    """Name of the resource and way out, where the text of the error misleads."""


OTHER, DEVICE, HOST = Resource(None), Resource("device"), Resource("host")
LIMITED = Resource("host")
"""Host memory, if the cell had a memory limit."""
PINNED = Resource("pinned host", "pinned host memory is exhausted; free memory of the host, or pin less")
KERNEL = Resource(
    None,
    "a kernel needs more shared memory or registers than the GPU has; try smaller blocks or another kernel",
)
SHARED_FILES = Resource(None, "probably /dev/shm is full; enlarge it (docker run --shm-size=16g)")
PERHAPS = Resource(None, "perhaps out of device memory; to find out, try a shorter sequence")
SIGNS: Sequence[tuple[Resource, str]] = (
    # Errors of the program and words about a peer may quote any text.
    (OTHER, r"^(\w+\n)*(Attribute|Import|ModuleNotFound|Key|Name|Type)Error\b|\b(by peer|peer closed)\b"),
    # torch raises an OutOfMemoryError if a compiled kernel does not fit.
    (KERNEL, r"out of resource: |too many resources requested for launch|(?i:launch_?out_?of_?resources)"),
    (KERNEL, r"uses too much shared data|allowed dynamic shared memory size"),
    (KERNEL, r"(?i:(shared|local) memory[\w ()]* exceeds )"),
    (SHARED_FILES, r"(allocat|creat)\w+ shared memory ?(segment|\(shm\))|insufficient shared memory"),
    (SHARED_FILES, r"workers are out of shared memory|killed by signal: Bus error"),
    (SHARED_FILES, r"(?s:^(?=.*(/dev/shm|/torch_\d+_|/psm_|shm_open|_fallocate|SemLock)).*No space left)"),
    (PINNED, r"Failed to CUDA host alloc|allocate pinned host memory"),
    # The same error may mean either; the device's allocator has words of its own.
    (DEVICE, r"out of memory\. Tried to allocate|driver error: out of memory"),
    (PINNED, r"(?is:^(?=.*(pin.memory|(?-i:\b(cu|hip|acl)\w*Host))).*(out.?of.?memory|MemoryAlloc|207001))"),
    (DEVICE, r"(?im:(^|[:\]] )(cuda|gpu|hip|npu|xpu|mps backend|musa|mlu) out of memory)"),
    (DEVICE, r"(?i:\b(cuda|hip|rocm|cublas|triton)( \w+)? (error|failure)\b.{,80}[:',] ?'?out of memory)"),
    (DEVICE, r"\b(cu|hip)[a-z]*[A-Z]\w+(\(.*?\))?'?( failed| returned)?( with error)?:? out of memory(?! b)"),
    (DEVICE, r"(cudaSuccess.*: |allowed memory\. \()out of memory|out of memory at line \d+ in file"),
    (DEVICE, r"RESOURCE_EXHAUSTED: (Out of memory|Failed to allocate)|PT_DEVMEM Allocation failed"),
    (DEVICE, r"\(EL0004\)|EL0004: |(result =|code is) 207001"),
    (DEVICE, r"(CU|HIP)(BLAS|DNN|SOLVER|FFT|SPARSE)_(STATUS_)?ALLOC_FAILED|DEVICE_ALLOCATION_FAILED"),
    (DEVICE, r"(cuda|hip)Error(MemoryAllocation|OutOfMemory)|(CUDA|HIP)_ERROR_O(UT_OF_MEMORY|utOfMemory)"),
    (DEVICE, r"Failed to CUDA [mc]alloc|ERROR_OUT_OF_DEVICE_MEMORY|resource\[DeviceMemory\]"),
    (HOST, r"running low on memory|HOST_ALLOCATION_FAILED"),
    (DEVICE, r"^([\w.]+[.\n])?OutOfMemoryError\b"),
    (HOST, r"(?m:^MemoryError\b)|std::bad_alloc|Cannot allocate memory \(12\)|\[Errno 12\]"),
    (HOST, r"DefaultCPUAllocator: (can't allocate|not enough) memory|allocate memory for thread-local data"),
    # A thread's stack counts as data. A thread that cannot be created may end in C++'s abort.
    (LIMITED, r"can't start new thread|Thread creation failed|pthread_create|without an active exception"),
    (LIMITED, r"Resource temporarily unavailable|\[Errno 11\]"),
    # oneDNN has no room for generated code or for its scratchpad.
    (LIMITED, r"could not (create|execute) a (primitive|memory)"),
    (PERHAPS, r"CUDNN_STATUS_INTERNAL_ERROR\b|(?i:unable to find an? (engine to|valid cudnn))"),
    (PERHAPS, r"_STATUS_NOT_INITIALIZED|when calling `\w+Create\b|_ERROR_OUT_OF_RESOURCES"),
)
"""Signs of an exhausted resource in a text, of which the first counts. The word "memory" alone is no sign.

A text begins with the type of the error. TorchScript puts the allocator's line at the end of its message.
"""
RESOURCE_WORDS = re.compile(r"pin_memory(?! *= *False)|\bSemLock\b")
"""Words in the source of a failed call that name a resource which its error does not name."""


def resource_by_text(text: str, *, limited: bool = False) -> Resource:
    """Return the resource that is exhausted by an error's type and text, or by a line of a log."""
    resources = (resource for resource, sign in SIGNS if re.search(sign, text))
    return next((resource for resource in resources if limited or resource is not LIMITED), OTHER)


def exhausted_resource(error: BaseException, *, limited: bool = False) -> Resource:
    """Return the resource that is exhausted by the type, the text and the failed call of an exception."""
    types = (cls.__name__ for cls in type(error).__mro__)
    words: list[str] = []
    for call in traceback.extract_tb(error.__traceback__)[-1:]:
        lines = linecache.getlines(call.filename)[(call.lineno or 1) - 1 : call.end_lineno or 1]
        words = RESOURCE_WORDS.findall("".join(lines))
    return resource_by_text("\n".join([*types, *words, str(error)]), limited=limited)


def root_cause(error: BaseException, *, limited: bool = False) -> tuple[BaseException, Resource]:
    """Return the exception in the chain of causes that means an exhausted resource, and the resource.

    Without such an exception the result is the first one and OTHER. The chain matters because the cleanup of
    a library may raise another error after an allocation has failed.
    """
    pairs = [(cause, exhausted_resource(cause, limited=limited)) for cause in _chain(error)]
    return min(pairs, key=lambda pair: (pair[1] is OTHER, pair[1] is PERHAPS))


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
