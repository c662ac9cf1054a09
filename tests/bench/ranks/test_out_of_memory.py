"""Errors that mean exhausted memory, by type and text, and the requested size."""

import errno
from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.ranks.log import RankLog
from bench.ranks.out_of_memory import (
    DEVICE,
    HOST,
    KERNEL,
    OTHER,
    PERHAPS,
    PINNED,
    SHARED_FILES,
    exhausted_resource,
    requested_bytes,
    resource_by_text,
    root_cause,
)
from bench.record.record import OutOfMemory
from bench.run.cell.outcome import shortage
from bench.run.node import failure
from tests.support.cells import tiny_cell

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
        ("Failed to CUDA host alloc 4923392 bytes", 4923392),
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
        assert exhausted_resource(raised.value).memory == "host"
        assert requested_bytes(str(raised.value)) >= 2**50


@pytest.mark.parametrize(
    ("error", "memory"),
    [
        (torch.OutOfMemoryError("anything"), "device"),
        (MemoryError(), "host"),
        (AttributeError("module 'cuda' has no attribute 'CUDA_ERROR_OUT_OF_MEMORY'"), None),
        (TypeError("OutOfMemoryError() takes no keyword arguments"), None),
        (RuntimeError("Connection closed by peer (CUDA out of memory)"), None),
        (RuntimeError("CUDA worker ran out of memory on the host and was killed"), None),
        (RuntimeError("node b is running low on memory"), "host"),
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
    assert exhausted_resource(error).memory == memory


def test_root_cause_finds_the_error_behind_a_failed_cleanup():
    try:
        try:
            raise MemoryError("first")
        finally:
            raise ValueError("second")
    except ValueError as error:
        cause, resource = root_cause(error)
    assert (str(cause), resource) == ("first", HOST)
    plain = ValueError("plain")
    assert root_cause(plain) == (plain, OTHER)


def test_root_cause_is_a_sure_error_before_an_unsure_one():
    error = RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED")
    assert root_cause(error) == (error, PERHAPS)
    error.__cause__ = torch.OutOfMemoryError("no room")
    assert root_cause(error) == (error.__cause__, DEVICE)


LIMIT = "Hardware limit: 101376. Reducing block sizes or `num_stages` may help."
NO_SPACE = "No space left on device"
IN_PIN_THREAD = "Caught RuntimeError in pin memory thread for device 0.\nOriginal Traceback"
WORDS = [
    (KERNEL, f"out of resource: shared memory, Required: 131074, {LIMIT}"),
    (KERNEL, f"out of resource: tensor memory, Required: 1024, {LIMIT}"),
    (KERNEL, f"No valid triton configs. OutOfMemoryError: out of resource: triton_tem_fused_0 {LIMIT}"),
    (KERNEL, "CUDA error: too many resources requested for launch\nCUDA kernel errors might be"),
    (KERNEL, "CUDA error (701): cudaErrorLaunchOutOfResources"),
    (KERNEL, "ptxas error : Entry function 'k' uses too much shared data (0x10100 bytes, 0xc000 max)"),
    (KERNEL, "Failed to set the allowed dynamic shared memory size to 163840"),
    (SHARED_FILES, f"unable to allocate shared memory(shm) for file </torch_76_36>: {NO_SPACE} (28)"),
    (SHARED_FILES, f"unable to write to file </torch_31911_952036340_6686>: {NO_SPACE} (28)"),
    (SHARED_FILES, "DataLoader worker (pid 325) is killed by signal: Bus error. "),
    (SHARED_FILES, "It is possible that dataloader's workers are out of shared memory. Please try to raise"),
    (SHARED_FILES, "Unexpected bus error. This might be caused by insufficient shared memory (shm)."),
    (SHARED_FILES, "Last error:\nError while creating shared memory segment /dev/shm/nccl-UmqSM9 (size 7)"),
    (SHARED_FILES, f"include/shm.h:28 NCCL WARN Call to posix_fallocate failed : {NO_SPACE}"),
    (SHARED_FILES, f"[Errno 28] {NO_SPACE}: '/dev/shm/sem.mp'"),
    (OTHER, f"[Errno 28] {NO_SPACE}: '/results/records.jsonl'"),
    (OTHER, f"[Errno 28] {NO_SPACE}: '/home/rashmi/.cache/torch_extensions/a'"),
    (KERNEL, "local memory (73728) exceeds limit (65536) in function '_attn_fwd'"),
    (KERNEL, "launch shared memory exceeds current GPU arch sm_89 allowed. Allocated: 131072"),
    (PINNED, "hipHostMalloc failed: hipErrorOutOfMemory"),
    (PINNED, "cuMemAllocHost failed: CUDA_ERROR_OUT_OF_MEMORY"),
    (DEVICE, "EL0004: alloc device memory failed, runtime result = 207001"),
    (DEVICE, "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 137438953472 bytes."),
    (DEVICE, "error == cudaSuccess. 2 vs 0. Error at: caffe2/core/context_gpu.cu:343: out of memory"),
    (DEVICE, "Error: out of memory at line 380 in file /src/csrc/ops.cu"),
    (DEVICE, "Allocation on device 0 would exceed allowed memory. (out of memory)"),
    (PERHAPS, "RuntimeError: Unable to find a valid cuDNN algorithm to run convolution"),
    (PINNED, "Failed to CUDA host alloc 4923392 bytes"),
    (PINNED, "could not allocate pinned host memory of size: 34359738368"),
    (PINNED, "cudaHostAlloc(&ptr, size, 0) failed: out of memory"),
    (PINNED, "cudaErrorMemoryAllocation in pin_memory"),
    (PINNED, f"{IN_PIN_THREAD} ...\nRuntimeError: CUDA error: out of memory"),
    (OTHER, f"{IN_PIN_THREAD} ...\nRuntimeError: CUDA error: invalid argument"),
    (DEVICE, "x.pin_memory(): CUDA out of memory. Tried to allocate 2.00 GiB"),
    (DEVICE, "x.pin_memory(): CUDA driver error: out of memory"),
    (DEVICE, "HIP out of memory. Tried to allocate 3.31 GiB. GPU 0 has a total capacity of 128.00 GiB"),
    (DEVICE, "NPU out of memory. Tried to allocate 22.00 MiB (NPU 0; 60.97 GiB total capacity; 10.24"),
    (DEVICE, "XPU out of memory. Tried to allocate 512.00 MiB. GPU 0 has a total capacity of 16.50 GiB"),
    (DEVICE, "MPS backend out of memory (MPS allocated: 7.64 GiB, other allocations: 68.91 GiB"),
    (DEVICE, "Triton Error [CUDA]: out of memory"),
    (DEVICE, "Triton Error [HIP]:  Code: 2, Messsage: out of memory"),
    (DEVICE, "CUDA driver error: out of memory"),
    (DEVICE, "CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62"),
    (DEVICE, "cuMemCreate(&handle, size, &prop, 0) failed: out of memory"),
    (DEVICE, "CUDA error: out of memorySearch for `cudaErrorMemoryAllocation' in https://docs.nvidia"),
    (DEVICE, "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    (DEVICE, "HIP error in file AMReX_GpuDevice.cpp line 402 hipErrorOutOfMemory !!!"),
    (DEVICE, "ncclUnhandledCudaError: Call failed.\nLast error:\nCuda failure 2 'out of memory'"),
    (DEVICE, "Failed to CUDA calloc async 608 bytes"),
    (DEVICE, "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"),
    (DEVICE, "Failed to allocate resource[DeviceMemory] with info [size:2147483648]. Reason: Memory"),
    (DEVICE, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    (PERHAPS, "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    (PERHAPS, "CUDA error: CUBLAS_STATUS_INTERNAL_ERROR when calling `cublasCreate(handle)`"),
    (PERHAPS, "level_zero backend failed with error: 40 (UR_RESULT_ERROR_OUT_OF_RESOURCES)"),
    (OTHER, "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm( handle, opa, opb, m)`"),
    (OTHER, "the CUDA worker was killed, as its machine has run out of memory"),
    (HOST, "unable to mmap 29764 bytes from file </torch_10182_302>: Cannot allocate memory (12)"),
]  # fmt: skip


@pytest.mark.parametrize(("resource", "text"), WORDS)
def test_words_of_libraries_name_the_resource(resource, text):
    assert resource_by_text(f"RuntimeError: {text}") is resource


def raise_without_room(*, pin_memory):
    raise RuntimeError(
        "CUDA error: out of memory" if pin_memory else "",
    )


def test_call_that_failed_tells_pinned_memory_from_the_device_s():
    with pytest.raises(RuntimeError) as raised:
        raise_without_room(pin_memory=True)
    assert exhausted_resource(raised.value).memory == "pinned host"
    assert exhausted_resource(RuntimeError(*raised.value.args)).memory == "device"


def test_call_that_failed_tells_a_semaphore_from_a_full_disk():
    error = OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="No space") as raised:
        raise error  # as multiprocessing's SemLock does
    assert exhausted_resource(raised.value) is SHARED_FILES
    assert exhausted_resource(OSError(*error.args)) is OTHER


@pytest.mark.parametrize(("memory", "allocated"), [("device", 7), ("pinned host", None)])
def test_bytes_allocated_on_a_gpu_are_stated_only_for_its_memory(memory, allocated):
    cluster = replace(tiny_cell().cluster, device="cuda")
    assert failure._out_of_memory(MemoryError(), memory, 7, cluster).allocated_bytes == allocated


def test_failure_of_a_kernel_is_no_memory_and_names_the_way_out():
    error = torch.OutOfMemoryError(f"out of resource: shared memory, {LIMIT}")
    written = failure.describe_failure(error, RankLog(print), tiny_cell().cluster)
    assert written.out_of_memory is None
    assert written.message == f"{KERNEL.advice}: {error}"
