"""Errors that mean exhausted memory, by type and text, and the requested size."""

import errno

import numpy as np
import pytest
import torch

from bench.ranks.out_of_memory import exhausted_memory, requested_bytes, root_cause
from bench.record.record import OutOfMemory
from bench.run.cell.outcome import shortage

MIB = 2**20
ROOM = "could not allocate 16.0 MiB of host memory"
AFTERWARDS = " after the failed operation had freed its memory"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 2097152 bytes. Error", 2097152),
        ("The operation failed ...\nRuntimeError: you tried to allocate 64 bytes.", 64),
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB", 2 * 2**30),
        ("CUDA out of memory. Tried to allocate 20.00 MiB. GPU", 20 * 2**20),
        ("Unable to allocate 8.00 MiB for an array with shape (1048576,)", 8 * 2**20),
        ("Failed to CUDA calloc async 608 bytes", 608),
        ("can't start new thread", None),
        ("", None),
    ],
)
def test_requested_bytes_are_read_from_the_message(text, expected):
    assert requested_bytes(text) == expected


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (
            (16 * MIB, 200 * MIB, 204 * MIB),
            f"{ROOM}, with 200.0 MiB of a limit of 204.0 MiB allocated",
        ),
        (
            (16 * MIB, 180 * MIB, 204 * MIB),
            f"{ROOM}, with 180.0 MiB of a limit of 204.0 MiB allocated{AFTERWARDS}",
        ),
        ((16 * MIB, 200 * MIB, None), f"{ROOM}, with 200.0 MiB allocated"),
        ((16 * MIB, None, None), ROOM),
        ((None, 200 * MIB, None), "no primitive, with 200.0 MiB allocated"),
        ((None, None, None), "no primitive"),
    ],
)
def test_shortage_states_known_request_use_and_limit(found, expected):
    requested, held, limit = found
    told = OutOfMemory(
        memory="host", requested_bytes=requested, allocated_bytes=held, limit_bytes=limit, largest=[]
    )
    assert shortage(told, "no primitive\nstack") == expected


def test_real_allocation_errors_are_recognized_with_their_size():
    for allocate in (torch.empty, np.empty):
        with pytest.raises((RuntimeError, MemoryError)) as raised:
            allocate(2**50)
        assert exhausted_memory(raised.value) == "host"
        assert requested_bytes(str(raised.value)) >= 2**50


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("anything"), "device"),
        (MemoryError(), "host"),
        (OSError(errno.ENOMEM, "no"), "host"),
        (OSError(errno.ENOENT, "no"), None),
        (RuntimeError("illegal memory access"), None),
        (ValueError("pin_memory is not allowed"), None),
        (RuntimeError("cuDNN: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"), "device"),
        (RuntimeError("cuDNN: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED"), "host"),
        (RuntimeError("CUDNN_STATUS_INTERNAL_ERROR_UNEXPECTED_VALUE"), None),
    ],
)
def test_memory_of_error_by_type_and_text(error, memory):
    assert exhausted_memory(error) == memory


def test_root_cause_finds_the_error_behind_a_failed_cleanup():
    try:
        try:
            raise MemoryError("first")
        finally:
            raise ValueError("second")
    except ValueError as error:
        cause, memory = root_cause(error)
    assert (str(cause), memory) == ("first", "host")
    plain = ValueError("plain")
    assert root_cause(plain) == (plain, None)
