"""CUDA simulated on the CPU in the rank processes of a test, without CUDA kernels, speed or device memory.

It simulates what Python can see: `torch.cuda`, NVML, NCCL process groups (on gloo), streams, events and
traces with kernels. It also enforces rules that a CPU does not have:

- A tensor is on the side of the device or of the host. Operators on tensors of both sides, and `numpy()` and
  pinning of a device tensor, raise as on a GPU. If a side is unknown, as with gradients from C++, nothing
  raises.
- Within a timed step, the fake records operations that make the host wait for the device, and copies from
  memory that is not pinned, with the function that calls them.
- The fake records every collective that Python calls. Before an asynchronous one is waited for, code must not
  use the tensors that it receives or change the tensors that it sends.

There is one stream, because the product creates no other. `problems` compares the records of the ranks. All
meshes are CPU meshes, so FSDP2 uses no streams here.
"""

import contextlib
import itertools
import json
import os
import sys
import time
import types
from collections import Counter, defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.numa.binding
from torch._C._distributed_c10d import ProcessGroup, PythonCallbackWork, Work
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile

import bench.ranks.groups
from bench.common.environment import this_machine
from bench.measure.calls import COLLECTIVES
from bench.measure.timing.clock import StepClock
from bench.record.record import Provenance
from bench.request.modes import MODES
from bench.run.node.worker import run_cell
from tests.support.cuda import fake_cudnn
from tests.support.cuda.fake_nvml import MEMORY_BYTES, NAME, FakeNvml, uuid

NOTES = "fake_cuda_{rank}.json"
HOST, DEVICE = "host", "device"
CPU = torch.device("cpu")
ON_DEVICE = torch.device("cpu", 0)
"""Device that a device tensor reports: a CPU, but distinct from the host's."""
PASSED_UNCHANGED = {torch.device, torch._C._nn._parse_to}
"""Functions that take a device as a value; operators that another mode has handled pass unchanged too."""
FROM_NUMBERS = {"tensor", "as_tensor", "scalar_tensor", "asarray"}
CREATES_TENSOR = FROM_NUMBERS | {
    "empty", "zeros", "ones", "full", "arange", "rand", "randn", "randint", "randperm", "linspace", "eye",
    "from_numpy", "frombuffer", "empty_strided",
}  # fmt: skip
READ_BY_HOST = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "nonzero", "masked_select", "unique",
    "equal", "allclose", "is_nonzero",
}  # fmt: skip
BOTH_SIDES = {
    "copy_", "__getitem__", "__setitem__", "__set__", "__get__", "index_put_", "to", "type_as", "backward",
    "_foreach_copy_", "set_", "grad", "is_set_to",
}  # fmt: skip
"""Functions that take tensors of both sides."""
READS_NO_NUMBERS = {
    "__get__", "size", "stride", "dim", "numel", "nelement", "element_size", "is_contiguous", "data_ptr",
    "storage_offset", "untyped_storage", "__len__", "view", "narrow", "split", "chunk", "unbind", "transpose",
    "t", "permute", "unsqueeze", "squeeze", "expand", "select", "detach", "__getitem__", "unflatten",
    "as_strided", "view_as", "requires_grad_", "__hash__", "record_stream", "is_floating_point", "__set__",
    "_has_compatible_shallow_copy_type", "register_hook", "retain_grad", "is_complex", "type", "get_device",
    "is_pinned", "is_shared", "__iter__",
}  # fmt: skip
"""Functions that do not read the numbers of a tensor."""


class Stream:
    """Stream on which all operations run at once."""

    def __init__(self, device=None, priority=0, **_):
        self.device, self.priority, self.device_type, self.device_index = device, priority, 1, 0
        self.cuda_stream = self.stream_id = id(self)

    def wait_stream(self, other): ...

    def is_capturing(self):
        return False

    def wait_event(self, event): ...

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        CUDA.wait("stream synchronize")

    def __enter__(self):
        return self

    def __exit__(self, *_): ...


class Event:
    """Event with the time at which it was recorded."""

    def __init__(self, enable_timing=False, **_):
        self.is_timed, self.at_s = enable_timing, None

    def record(self, stream=None):
        self.at_s = time.perf_counter()

    def query(self):
        return True

    def elapsed_time(self, other):
        assert [self.is_timed, other.is_timed] == [True, True], (
            "elapsed_time() needs events with enable_timing=True"
        )
        return (other.at_s - self.at_s) * 1e3


PlainGenerator = torch.Generator


class Generator(PlainGenerator):
    """CPU generator, for any device."""

    def __new__(cls, device="cpu"):
        return PlainGenerator.__new__(PlainGenerator, on_cpu(device))


def on_cpu(value):
    """Return the CPU in place of a GPU; other values unchanged."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" or value == ON_DEVICE else value
    is_cuda = isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    return "cpu" if is_cuda else value


def side_of(value):
    """Return the side of a device; None if the value is not a device."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "cuda")):
        return HOST if torch.device(value) == CPU else DEVICE
    return DEVICE if isinstance(value, str) and value.startswith("cuda:") else None


def tensors_in(value):
    """Yield the tensors in an argument or in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)


def memory_range(tensor):
    """Return the first and last address of a tensor's numbers."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def calling_function():
    """Return the innermost function outside of torch and this file, as `folder/file.py:function`."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path != __file__ and "/torch/" not in path and not f"{path} {name}".count("<"):
            break
        frame = frame.f_back
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_code.co_name}"


class FakeCuda:
    """State of one rank's simulated device, and records of its use."""

    def __init__(self):
        self.stream = Stream()
        self.device = 0
        self.fraction = 1.0
        self.in_flight = {}
        self.calls = []
        self.faults = []
        self.waits = Counter()
        self.steps = 0
        self.ranges, self.open_ranges = [], []
        self.is_counting = False

    def start_range(self, name):
        self.ranges.append(name)
        self.open_ranges.append(len(self.ranges))
        return len(self.ranges)

    def wait(self, what):
        """Record that the host waits for the device, or copies from memory that is not pinned."""
        if self.is_counting:
            self.waits[f"{what} in {calling_function()}"] += 1

    def synchronize(self, _device=None):
        self.wait("synchronize")
        for work, pending in self.in_flight.items():  # gloo does not report that a send or receive is over
            while pending.kind not in ("send", "recv") and not work.is_completed():
                os.sched_yield()
        self.in_flight.clear()

    def check(self, name, tensors):
        """Record a fault if an operator uses tensors of a pending collective."""
        if name in READS_NO_NUMBERS:
            return
        is_changing = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        for pending in self.in_flight.values():
            if any(overlaps(tensor, pending.received) for tensor in tensors):
                self.faults.append(f"{name} uses what {pending.kind} receives, in {calling_function()}")
            if is_changing and overlaps(tensors[0], pending.sent):
                self.faults.append(f"{name} changes what {pending.kind} sends, in {calling_function()}")

    def notes(self):
        """Return the records that are written to the rank's folder."""
        names = ("calls", "faults", "waits", "steps", "ranges", "open_ranges")
        return {name: getattr(self, name) for name in names}


class PendingCollective:
    """Collective that was not waited for; it holds its tensors, so that no others take their memory."""

    def __init__(self, kind, received, sent):
        self.kind, self.tensors = kind, (received, sent)
        self.received, self.sent = (
            [memory_range(tensor) for tensor in tensors] for tensors in (received, sent)
        )


def overlaps(tensor, ranges):
    """Return whether a tensor's numbers lie in one of these memory ranges."""
    if not ranges or tensor.layout != torch.strided or not tensor.numel() or tensor.is_meta:
        return False
    start, end = memory_range(tensor)
    return any(start < stop and begin < end for begin, stop in ranges)


CUDA = FakeCuda()


class OnDevice(TorchFunctionMode):
    """Mode that runs all functions on the CPU and stores the side of a tensor as its attribute."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in PASSED_UNCHANGED or isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [*tensors_in([*args, *kwargs.values()])]
        requested = self._requested_side(name, args, kwargs)
        self._refuse(name, tensors, kwargs)
        if tensors and CUDA.in_flight:
            CUDA.check(name, tensors)
        self._count(name, tensors, args, kwargs, requested)
        if func == torch.Tensor.device.__get__:
            return _device_of(args[0])
        if func is torch.Tensor.is_pinned:
            return is_pinned(args[0])
        if func is scaled_dot_product_attention and torch.backends.cuda.cudnn_sdp_enabled():
            func = fake_cudnn.attend  # torch's first choice on Hopper
        pinned = kwargs.pop("pin_memory", False) or func is torch.Tensor.pin_memory
        if func is torch.Tensor.pin_memory or func is torch.Tensor.cuda:
            result = args[0].clone()
        else:
            swapped = {key: on_cpu(value) for key, value in kwargs.items()}
            result = func(*map(on_cpu, args), **swapped)
        if (
            name in ("to", "cpu")
            and result is args[0]
            and {vars(result).get("_side"), requested} == {HOST, DEVICE}
        ):
            result = result.clone()  # a CPU has nothing to copy
        return self._with_side(func, result, tensors, requested, pinned=pinned)

    def _requested_side(self, name, args, kwargs):
        """Return the side that the call names; None if it names none."""
        if name in ("cuda", "cpu"):
            return DEVICE if name == "cuda" else HOST
        devices = [kwargs.get("device"), *(args[1:] if name == "to" else ())]
        sides = [side for value in devices if (side := side_of(value)) is not None]
        if sides:
            return sides[0]
        return HOST if name in CREATES_TENSOR else None

    def _refuse(self, name, tensors, kwargs):
        """Raise the error of a GPU for calls that it does not support."""
        sides = {vars(tensor).get("_side") for tensor in tensors if tensor.dim() > 0}
        if name == "numpy" and DEVICE in sides:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if name == "pin_memory" and any(0 in tensor.stride() for tensor in tensors if tensor.numel() > 1):
            raise RuntimeError("more than one element of the written-to tensor refers to a single memory")
        if name == "pin_memory" and DEVICE in sides:
            raise RuntimeError("cannot pin 'torch.cuda.LongTensor' only dense CPU tensors can be pinned")
        if {HOST, DEVICE} <= sides and name not in BOTH_SIDES | READS_NO_NUMBERS:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and"
                f" cpu! ({name})"
            )

    def _count(self, name, tensors, args, kwargs, requested):
        """Record waits of the host, and copies from memory that is not pinned."""
        if not CUDA.is_counting:
            return
        sides = [vars(tensor).get("_side") for tensor in tensors] or [None]
        is_from_numbers = name in FROM_NUMBERS and requested == DEVICE and not tensors
        if is_from_numbers or (name in READ_BY_HOST and sides[0] != HOST):
            CUDA.wait(name)
        elif name in ("to", "cpu", "cuda") and requested not in (None, sides[0]) and tensors:
            self._count_copy(name, requested, tensors[0], waits=not _non_blocking(args, kwargs))
        elif name == "copy_" and {*sides} == {HOST, DEVICE}:
            self._count_copy(name, sides[0], tensors[1], waits=not _non_blocking(args, kwargs))

    def _count_copy(self, name, to, tensor, *, waits):
        if to == HOST and waits:
            CUDA.wait(f"{name} to the host")
        elif to == DEVICE and vars(tensor).get("_side") == HOST and tensor.numel() > 0:
            if not is_pinned(tensor):
                CUDA.wait(f"{name} from pageable memory")
            elif waits:
                CUDA.wait(f"{name} from pinned memory")

    def _with_side(self, func, result, tensors, requested, *, pinned):
        """Return the result after storing the side of its tensors."""
        sides = {vars(tensor).get("_side") for tensor in tensors}
        side = requested or (DEVICE if DEVICE in sides else HOST if sides == {HOST} else None)
        if func == torch.Tensor.data.__set__:
            mark(tensors[0], vars(tensors[1]).get("_side"), pinned=is_pinned(tensors[1]))
            return result
        is_of_pinned = any(is_pinned(tensor) and is_view(result, tensor) for tensor in tensors[:1])
        pinned = pinned or (side == HOST and is_of_pinned)
        for tensor in tensors_in(result):
            if vars(tensor).get("_side") is None or requested is not None or pinned:
                mark(tensor, HOST if pinned else side, pinned=pinned)
        if side == DEVICE and requested == DEVICE and isinstance(result, torch.Tensor):
            self._refuse_without_room(result)
        return result

    def _refuse_without_room(self, result):
        if result.nbytes > CUDA.fraction * MEMORY_BYTES:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {result.nbytes / 2**20:.2f} MiB. GPU 0 has a total"
                " capacity of 79.65 GiB, which a test plays."
            )


def mark(tensor, side, *, pinned=False):
    """Store the side of a tensor, and whether it is pinned."""
    tensor._side, tensor._pinned = side, pinned


def is_pinned(tensor):
    return vars(tensor).get("_pinned", False)


def is_view(result, tensor):
    """Return whether the result shares the memory of a tensor."""
    is_tensor = isinstance(result, torch.Tensor)
    return is_tensor and result.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _device_of(tensor):
    """Return the device of a tensor; the GPU if its side is unknown, as with most tensors of C++."""
    return CPU if vars(tensor).get("_side") == HOST else torch.device("meta") if tensor.is_meta else ON_DEVICE


def _non_blocking(args, kwargs):
    return bool(kwargs.get("non_blocking") or any(arg is True for arg in args[2:3]))


class Properties:
    name, total_memory, major, minor = NAME, MEMORY_BYTES, 9, 0

    def __init__(self, device):
        self.uuid = uuid(device)


def _index_of(device):
    return (device.index or 0) if isinstance(device, torch.device) else int(device or 0)


def _fake_device(count):
    """Replace the functions of `torch.cuda` and related modules."""
    for name, function in _functions(count).items():
        setattr(torch.cuda, name, function)
        if hasattr(torch.cuda.memory, name):
            setattr(torch.cuda.memory, name, function)
    torch.cuda.memory.get_allocator_backend = lambda: "native"
    torch.cuda.memory._snapshot = lambda *_, **__: {"allocator_settings": {"expandable_segments": False}}
    torch.cuda.nccl.version = lambda: (2, 27, 5)
    torch.cuda.nvtx = types.SimpleNamespace(
        range_push=lambda _: None,
        range_pop=lambda: None,
        range_start=CUDA.start_range,
        range_end=CUDA.open_ranges.remove,
    )
    cpus = sorted(os.sched_getaffinity(0))
    for kind in ("gpu", "device"):  # torch 2.14 renamed it
        name = f"_get_numa_node_index_for_{kind}_index"
        setattr(torch.numa.binding, name, lambda **index: next(iter(index.values())))
    torch.numa.binding._get_allowed_logical_cpu_indices_for_numa_node = lambda *, numa_node_index: {
        cpus[numa_node_index % len(cpus)]
    }
    torch.version.cuda = "13.0"
    torch.accelerator.is_available = lambda: True
    torch.accelerator.current_accelerator = lambda *_, **__: torch.device("cuda")
    torch.accelerator.current_stream = lambda _=None: CUDA.stream
    torch.accelerator.current_device_index = lambda: CUDA.device
    torch.accelerator.synchronize = CUDA.synchronize
    torch.Tensor.record_stream = lambda *_: None
    torch.Generator = Generator


def _functions(count):
    """Return replacements of functions and classes of `torch.cuda` by name."""
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: count,
        "current_device": lambda: CUDA.device,
        "set_device": lambda device: setattr(CUDA, "device", _index_of(device)),
        "synchronize": CUDA.synchronize,
        "Event": Event,
        "Stream": Stream,
        "stream": lambda stream: stream,
        "current_stream": lambda _=None: CUDA.stream,
        "default_stream": lambda _=None: CUDA.stream,
        "empty_cache": lambda: CUDA.wait("empty_cache"),
        "memory_allocated": _resident,
        "memory_reserved": _resident,
        "max_memory_allocated": _resident,
        "max_memory_reserved": _resident,
        "reset_peak_memory_stats": lambda _=None: None,
        "memory_stats": lambda _=None: {"num_alloc_retries": 0, "num_ooms": 0},
        "mem_get_info": lambda _=None: (60 * 2**30, MEMORY_BYTES),
        "get_device_properties": lambda device=None: Properties(_index_of(device)),
        "get_device_capability": lambda _=None: (9, 0),
        "get_device_name": lambda _=None: NAME,
        "set_per_process_memory_fraction": lambda share, _=None: setattr(CUDA, "fraction", share),
        "get_per_process_memory_fraction": lambda _=None: CUDA.fraction,
        "is_bf16_supported": lambda *_, **__: True,
        "is_current_stream_capturing": lambda: False,
        "manual_seed_all": lambda _: None,
    }


def _resident(_=None):
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


SENT_AND_RECEIVED = {
    "allreduce": (0, 0), "allreduce_coalesced": (0, 0), "broadcast": (None, 0), "_allgather_base": (1, 0),
    "allgather": (1, 0), "allgather_into_tensor_coalesced": (1, 0), "_reduce_scatter_base": (1, 0),
    "reduce_scatter": (1, 0), "reduce_scatter_tensor_coalesced": (1, 0), "alltoall_base": (1, 0),
    "alltoall": (1, 0), "send": (0, None), "recv": (None, 0), "gather": (1, 0), "scatter": (1, 0),
    "barrier": (None, None),
}  # fmt: skip
"""Indices of the sent and the received argument of every method of a process group."""


def _fake_nccl():
    """Create gloo process groups where NCCL groups are requested."""
    d = dist.distributed_c10d
    init, new_group, barrier = d.init_process_group, d.new_group, d.barrier

    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        carried = {("nccl", "cuda"): "gloo", ("fake", None): "fake"}
        return init(carried[backend, getattr(device_id, "type", None)], *args, **kwargs)

    def new_gloo_group(ranks=None, timeout=None, backend=None, *args, device_id=None, **kwargs):
        return new_group(ranks, timeout, "gloo" if backend else None, *args, **kwargs)

    def gloo_barrier(group=None, async_op=False, device_ids=None):
        return barrier(group, async_op)

    for module in (dist, d):
        module.init_process_group = init_process_group
        module.new_group = new_gloo_group
        module.barrier = gloo_barrier
    get_backend = dist.get_backend
    dist.get_backend = lambda group=None: get_backend(group).replace("gloo", "nccl")
    init_mesh = dist.device_mesh.init_device_mesh

    def cpu_mesh(device_type, *args, **kwargs):
        return init_mesh(on_cpu(device_type), *args, **kwargs)

    d._get_object_coll_device = lambda _=None: "cuda"
    parallel = DistributedDataParallel.__init__

    def init_on_gpu(self, module, device_ids=None, output_device=None, **kwargs):
        assert device_ids in (None, [CUDA.device]), device_ids
        parallel(self, module, **kwargs)

    DistributedDataParallel.__init__ = init_on_gpu
    for module in (dist, dist.device_mesh, bench.ranks.groups):
        module.init_device_mesh = cpu_mesh
    _fully_shard._get_device_from_mesh = lambda _: ON_DEVICE


def _record_calls():
    """Record the calls of process groups, and the waits for them."""
    for name, arguments in SENT_AND_RECEIVED.items():
        setattr(ProcessGroup, name, _recording_call(name, getattr(ProcessGroup, name), *arguments))
    for kind in (Work, PythonCallbackWork):
        kind.wait = _recording_wait(kind.wait)


def _recording_wait(wait):
    def record_and_wait(work, *args):
        CUDA.in_flight.pop(work, None)
        return wait(work, *args)

    return record_and_wait


def _recording_call(name, method, sent, received):
    def record_and_call(group, *args, **kwargs):
        sent_tensors, received_tensors = (
            [] if index is None or len(args) <= index else [*tensors_in(args[index])]
            for index in (sent, received)
        )
        if any(vars(tensor).get("_side") == HOST for tensor in (*sent_tensors, *received_tensors)):
            raise RuntimeError(f"No backend type associated with device type cpu ({name})")
        CUDA.check(name, sent_tensors)
        peer = args[1] if name in ("send", "recv") else None
        sizes = [tensor.numel() for tensor in (received_tensors if sent is None else sent_tensors)]
        ranks = dist.get_process_group_ranks(group)
        CUDA.calls.append([group.group_name, ranks, name, peer, sizes if name != "barrier" else []])
        work = method(group, *args, **kwargs)
        if work is not None:
            CUDA.in_flight[work] = PendingCollective(name, received_tensors, sent_tensors)
        return work

    return record_and_call


def _fake_autograd():
    """Enter the mode in backward too, which runs Python without a mode; use the CPU's autocast."""
    engine = torch.autograd._engine_run_backward

    def run(*args, **kwargs):
        with OnDevice():
            return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = run
    autocast = torch.amp.autocast_mode.autocast
    enter = autocast.__init__
    autocast.__init__ = lambda self, device_type, *args, **kwargs: enter(
        self, on_cpu(device_type), *args, **kwargs
    )
    checkpoint = torch.utils.checkpoint  # which compares tensors with and without a side
    checkpoint._allowed_determinism_checks_to_fns["default"] = lambda x: {"shape": x.shape, "dtype": x.dtype}
    grouped = torch._C._group_tensors_by_device_and_dtype

    def grouped_on_device(*args):
        groups = grouped(*args).items()
        return {(_device_of(lists[0][0]), dtype): (lists, rest) for (_, dtype), (lists, rest) in groups}

    torch._C._group_tensors_by_device_and_dtype = grouped_on_device
    is_enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    torch.is_autocast_enabled = lambda device="cpu": is_enabled(on_cpu(device))
    torch.get_autocast_dtype = lambda device: dtype(on_cpu(device))


def _fake_profiler():
    """Profile the CPU's operators, and add a kernel of every operator to the trace."""
    start, export = profile.__init__, profile.export_chrome_trace

    def without_cuda(self, *args, activities=None, **kwargs):
        activities = [activity for activity in activities or () if activity is not ProfilerActivity.CUDA]
        start(self, *args, activities=activities, **kwargs)

    def with_kernels(self, path, *args, **kwargs):
        export(self, path, *args, **kwargs)
        trace = json.loads(Path(path).read_text())
        trace["traceEvents"] += [*_kernels(trace["traceEvents"])]
        Path(path).write_text(json.dumps(trace))

    profile.__init__, profile.export_chrome_trace = without_cuda, with_kernels


def _kernels(events):
    """Yield a launch and a kernel or copy for every outermost operator.

    A collective has an NCCL kernel. A batch of sends and receives has one kernel, launched after the last
    call.
    """
    operators = [event for event in events if event.get("cat") == "cpu_op" and event["ph"] == "X"]
    end, batches = {}, {}
    for operator in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        name, thread, stop = operator["name"], operator["tid"], operator["ts"] + operator["dur"]
        kind = COLLECTIVES[name].kind if name in COLLECTIVES else None
        if kind in ("send", "recv"):
            batches[thread] = {**operator, "ts": stop + AFTER_US, "dur": 1}
        elif kind is not None:
            yield from _launch_and_kernel(operator, f"ncclDevKernel_{kind}", "kernel")
        elif name.startswith("aten::") and operator["ts"] >= end.get(thread, 0):
            end[thread] = stop
            if thread in batches:
                yield from _launch_and_kernel(batches.pop(thread), "ncclDevKernel_SendRecv", "kernel")
            yield from _launch_and_kernel(operator, name, "gpu_memcpy" if name == "aten::copy_" else "kernel")


def _launch_and_kernel(operator, name, category):
    """Yield a launch and the kernel or copy that it launched."""
    number = next(LAUNCHES)
    both = {"ph": "X", "pid": operator["pid"], "ts": operator["ts"], "args": {"correlation": number}}
    yield {**both, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": operator["tid"], "dur": 0}
    has_arguments = name.startswith("nccl") and not name.endswith("SendRecv")
    nccl_arguments = {"In msg nelems": 1, "dtype": "Float"} if has_arguments else {}
    args = {"correlation": number, **nccl_arguments}
    yield {**both, "cat": category, "name": name, "tid": 7, "dur": operator["dur"], "args": args}


LAUNCHES = itertools.count()
AFTER_US = 0.01
"""Microseconds from the last call of a batch to the launch of its kernel."""


def _count_in_timed_steps():
    """Record waits from the first mark of a timed step to the second."""
    mark_time = StepClock.mark

    def mark_and_count(clock):
        CUDA.is_counting = False
        mark_time(clock)
        CUDA.is_counting = len(clock._marks) == 1
        CUDA.steps += CUDA.is_counting

    StepClock.mark = mark_and_count


def install(job):
    """Simulate CUDA for the rest of this process."""
    count = job.cell.cluster.world_size
    sys.modules["pynvml"] = FakeNvml(count)
    _fake_device(count)
    _fake_nccl()
    _record_calls()
    _fake_autograd()
    _fake_profiler()
    _count_in_timed_steps()
    CUDA.operators = fake_cudnn.register_operators()
    OnDevice().__enter__()


def run_on_fake(entry, job, log):
    """Run `entry`, or the cell's passes, on the fake, and write the records to the rank's folder."""
    install(job)
    try:
        return (entry or run_cell)(job, log)
    finally:
        notes = json.dumps(CUDA.notes())
        (job.folder / NOTES.format(rank=job.rank)).write_text(notes)


@contextlib.contextmanager
def with_fake_gpus(launcher):
    """Run the launcher's GPU ranks on a fake of two GPUs; records have the provenance `synthetic`."""
    run = launcher.run

    def run_with_fake(self, cell, place, *, entry=None, **named):
        if cell.cluster.device == "cuda":
            entry = partial(run_on_fake, entry)
        return run(cell, place, entry=entry, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(launcher), "run", run_with_fake)
        patched.setitem(sys.modules, "pynvml", FakeNvml(2))
        for name in ("measure", "replay"):
            patched.setitem(MODES, name, replace(MODES[name], provenance=Provenance.SYNTHETIC))
        patched.setattr("bench.common.environment.torch_cuda", lambda: "13.0")
        this_machine.cache_clear()
        yield
    this_machine.cache_clear()


UNEVEN = {"alltoall", "alltoall_base", "gather", "scatter"}
"""Collectives in which ranks may send unequal parts."""


def notes_of(folder):
    """Return the records of a cell's ranks, by rank."""
    paths = sorted(folder.glob(NOTES.format(rank="*")), key=lambda path: int(path.stem.rpartition("_")[2]))
    return [json.loads(path.read_text()) for path in paths]


def problems(notes):
    """Return the faults of all ranks, and the first call of every group that differs between its ranks."""
    faults = [f"rank {rank}: {fault}" for rank, of_rank in enumerate(notes) for fault in of_rank["faults"]]
    return [*faults, *_out_of_order(notes), *_unpaired(notes)]


def _out_of_order(notes):
    groups = defaultdict(dict)
    for rank, of_rank in enumerate(notes):
        for name, ranks, kind, peer, sizes in of_rank["calls"]:
            calls = groups[name, tuple(ranks)].setdefault(rank, [])
            if peer is None:
                calls.append((kind, None if kind in UNEVEN else tuple(sizes)))
    for (name, ranks), by_rank in groups.items():
        for number, calls in enumerate(itertools.zip_longest(*(by_rank.get(rank, []) for rank in ranks))):
            if len({*calls}) > 1:
                differences = ", ".join(
                    f"{call} on rank {rank}" for rank, call in zip(ranks, calls, strict=True)
                )
                yield f"call {number} of group {name} is {differences}"
                break


def _unpaired(notes):
    sent, received = defaultdict(list), defaultdict(list)
    for rank, of_rank in enumerate(notes):
        for name, ranks, kind, peer, sizes in of_rank["calls"]:
            if kind == "send":
                sent[name, rank, ranks[peer]].append(sizes)
            elif kind == "recv":
                received[name, ranks[peer], rank].append(sizes)
    for pair in {**sent, **received}:
        if sent[pair] != received[pair]:
            name, source, target = pair
            reception = f"which receives {received[pair]}, in group {name}"
            yield f"rank {source} sends {sent[pair]} to rank {target}, {reception}"
