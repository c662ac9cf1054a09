"""A CUDA that the CPU plays, in the ranks of a test alone: no kernels of CUDA, no speed, no device memory.

What it has in common with the real one is what Python sees: `torch.cuda`, NVML, NCCL's process groups (gloo
carries them), streams, events, traces with kernels, and the rules that a CPU does not have:

- A tensor has a side, the device's or the host's. Ops on tensors of both sides, `numpy()` of the device's and
  pinning it raise as on a GPU. Where a side is not known, as of gradients that C++ makes, nothing raises.
- Whatever would make the host wait for the device, and every copy from memory that is not pinned, is noted
  while a timed step runs, with the place in the code.
- Every collective that Python calls is noted. What an asynchronous one receives must not be used before it is
  waited for, nor what it sends be changed.

All streams are one: of ours no code makes another.

`problems` compares what the ranks noted. Meshes are of the CPU: FSDP2 uses no streams here.
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
from tests.support.cuda.fake_nvml import MEMORY_BYTES, NAME, FakeNvml, uuid

NOTES = "fake_cuda_{rank}.json"
HOST, DEVICE = "host", "device"
CPU = torch.device("cpu")
ON_DEVICE = torch.device("cpu", 0)
"""What a tensor of the device says it is on: a CPU to all who ask, and yet not the host's."""
AS_THEY_ARE = {torch.device, torch._C._nn._parse_to}
"""Functions to which a device is a name; so are operators that another mode has seen already."""
FROM_NUMBERS = {"tensor", "as_tensor", "scalar_tensor", "asarray"}
MADE_ANEW = FROM_NUMBERS | {
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
LOOKS_ONLY = {
    "__get__", "size", "stride", "dim", "numel", "nelement", "element_size", "is_contiguous", "data_ptr",
    "storage_offset", "untyped_storage", "__len__", "view", "narrow", "split", "chunk", "unbind", "transpose",
    "t", "permute", "unsqueeze", "squeeze", "expand", "select", "detach", "__getitem__", "unflatten",
    "as_strided", "view_as", "requires_grad_", "__hash__", "record_stream", "is_floating_point", "__set__",
    "_has_compatible_shallow_copy_type", "register_hook", "retain_grad", "is_complex", "type", "get_device",
    "is_pinned", "is_shared", "__iter__",
}  # fmt: skip
"""Functions that read no numbers."""


class Stream:
    """A name: what is queued is done at once."""

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
    """A mark in a stream, and the time at which it was made."""

    def __init__(self, enable_timing=False, **_):
        self.is_timed, self.at_s = enable_timing, None

    def record(self, stream=None):
        self.at_s = time.perf_counter()

    def query(self):
        return True

    def elapsed_time(self, other):
        assert [self.is_timed, other.is_timed] == [True, True], "an event that takes no time was asked for it"
        return (other.at_s - self.at_s) * 1e3


PlainGenerator = torch.Generator


class Generator(PlainGenerator):
    """A generator of the CPU, whatever device it is for."""

    def __new__(cls, device="cpu"):
        return PlainGenerator.__new__(PlainGenerator, moved(device))


def moved(value):
    """The CPU in place of a GPU, wherever it stands."""
    if isinstance(value, torch.device):
        return CPU if value.type == "cuda" or value == ON_DEVICE else value
    is_cuda = isinstance(value, str) and (value == "cuda" or value.startswith("cuda:"))
    return "cpu" if is_cuda else value


def side_of(value):
    """The side that a device is on; None of what is no device."""
    if isinstance(value, torch.device) or (isinstance(value, str) and value in ("cpu", "cuda")):
        return HOST if torch.device(value) == CPU else DEVICE
    return DEVICE if isinstance(value, str) and value.startswith("cuda:") else None


def tensors_in(value):
    """The tensors in an argument or a list of them, however deep."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)


def place_of(tensor):
    """Where its numbers lie in memory, from and to."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + (last + 1) * tensor.element_size()


def where():
    """The innermost function that is neither torch's nor of this file, as `folder/file.py:function`."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        if path != __file__ and "/torch/" not in path and not f"{path} {name}".count("<"):
            break
        frame = frame.f_back
    return f"{'/'.join(Path(frame.f_code.co_filename).parts[-2:])}:{frame.f_code.co_name}"


class FakeCuda:
    """What one rank's device is asked to do."""

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
        """The host waits for the device, also as it copies between it and memory that is not pinned."""
        if self.is_counting:
            self.waits[f"{what} in {where()}"] += 1

    def synchronize(self, _device=None):
        self.wait("synchronize")
        for work, flight in self.in_flight.items():  # gloo does not say of a send or receive that it is over
            while flight.kind not in ("send", "recv") and not work.is_completed():
                os.sched_yield()
        self.in_flight.clear()

    def check(self, name, tensors):
        """Whether these may be used now."""
        if name in LOOKS_ONLY:
            return
        is_changing = (name.endswith("_") and not name.endswith("__")) or name == "__setitem__"
        for flight in self.in_flight.values():
            if any(overlaps(each, flight.received) for each in tensors):
                self.faults.append(f"{name} uses what {flight.kind} receives, in {where()}")
            if is_changing and overlaps(tensors[0], flight.sent):
                self.faults.append(f"{name} changes what {flight.kind} sends, in {where()}")

    def notes(self):
        """For the file."""
        names = ("calls", "faults", "waits", "steps", "ranges", "open_ranges")
        return {name: getattr(self, name) for name in names}


class Flight:
    """A collective that nobody has waited for; it keeps its tensors, so that nothing takes their place."""

    def __init__(self, kind, received, sent):
        self.kind, self.kept = kind, (received, sent)
        self.received, self.sent = ([place_of(each) for each in tensors] for tensors in (received, sent))


def overlaps(tensor, places):
    """Whether a tensor's numbers lie in one of these places."""
    if not places or tensor.layout != torch.strided or not tensor.numel() or tensor.is_meta:
        return False
    start, end = place_of(tensor)
    return any(start < stop and begin < end for begin, stop in places)


CUDA = FakeCuda()


class OnDevice(TorchFunctionMode):
    """Runs everything on the CPU, and keeps which side a tensor is on as an attribute of it."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in AS_THEY_ARE or isinstance(func, torch._ops.OpOverload):
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        tensors = [*tensors_in([*args, *kwargs.values()])]
        asked = self._asked(name, args, kwargs)
        self._refuse(name, tensors, kwargs)
        if tensors and CUDA.in_flight:
            CUDA.check(name, tensors)
        self._count(name, tensors, args, kwargs, asked)
        if func == torch.Tensor.device.__get__:
            return _device_of(args[0])
        if func is torch.Tensor.is_pinned:
            return is_pinned(args[0])
        pinned = kwargs.pop("pin_memory", False) or func is torch.Tensor.pin_memory
        if func is torch.Tensor.pin_memory or func is torch.Tensor.cuda:
            made = args[0].clone()
        else:
            swapped = {key: moved(value) for key, value in kwargs.items()}
            made = func(*map(moved, args), **swapped)
        if name in ("to", "cpu") and made is args[0] and {vars(made).get("_side"), asked} == {HOST, DEVICE}:
            made = made.clone()  # a CPU has nothing to copy
        return self._marked(func, made, tensors, asked, pinned=pinned)

    def _asked(self, name, args, kwargs):
        """The side that the caller names."""
        if name in ("cuda", "cpu"):
            return DEVICE if name == "cuda" else HOST
        named = [kwargs.get("device"), *(args[1:] if name == "to" else ())]
        found = [side for value in named if (side := side_of(value)) is not None]
        if found:
            return found[0]
        return HOST if name in MADE_ANEW else None

    def _refuse(self, name, tensors, kwargs):
        """What a GPU cannot do."""
        sides = {vars(each).get("_side") for each in tensors if each.dim() > 0}
        if name == "numpy" and DEVICE in sides:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")
        if name == "pin_memory" and any(0 in each.stride() for each in tensors if each.numel() > 1):
            raise RuntimeError("more than one element of the written-to tensor refers to a single memory")
        if name == "pin_memory" and DEVICE in sides:
            raise RuntimeError("cannot pin 'torch.cuda.LongTensor' only dense CPU tensors can be pinned")
        if {HOST, DEVICE} <= sides and name not in BOTH_SIDES | LOOKS_ONLY:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and"
                f" cpu! ({name})"
            )

    def _count(self, name, tensors, args, kwargs, asked):
        """What the host waits for, and what is copied from memory that is not pinned."""
        if not CUDA.is_counting:
            return
        sides = [vars(each).get("_side") for each in tensors] or [None]
        is_from_numbers = name in FROM_NUMBERS and asked == DEVICE and not tensors
        if is_from_numbers or (name in READ_BY_HOST and sides[0] != HOST):
            CUDA.wait(name)
        elif name in ("to", "cpu", "cuda") and asked not in (None, sides[0]) and tensors:
            self._count_copy(name, asked, tensors[0], waits=not _non_blocking(args, kwargs))
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

    def _marked(self, func, made, tensors, asked, *, pinned):
        """The result with its side."""
        sides = {vars(each).get("_side") for each in tensors}
        side = asked or (DEVICE if DEVICE in sides else HOST if sides == {HOST} else None)
        if func == torch.Tensor.data.__set__:
            mark(tensors[0], vars(tensors[1]).get("_side"), pinned=is_pinned(tensors[1]))
            return made
        is_of_pinned = any(is_pinned(each) and is_view(made, each) for each in tensors[:1])
        pinned = pinned or (side == HOST and is_of_pinned)
        for each in tensors_in(made):
            if vars(each).get("_side") is None or asked is not None or pinned:
                mark(each, HOST if pinned else side, pinned=pinned)
        if side == DEVICE and asked == DEVICE and isinstance(made, torch.Tensor):
            self._refuse_without_room(made)
        return made

    def _refuse_without_room(self, made):
        if made.nbytes > CUDA.fraction * MEMORY_BYTES:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {made.nbytes / 2**20:.2f} MiB. GPU 0 has a total"
                " capacity of 79.65 GiB, which a test plays."
            )


def mark(tensor, side, *, pinned=False):
    """Keep a tensor's side."""
    tensor._side, tensor._pinned = side, pinned


def is_pinned(tensor):
    return vars(tensor).get("_pinned", False)


def is_view(made, tensor):
    """Whether it has the memory of a tensor."""
    is_tensor = isinstance(made, torch.Tensor)
    return is_tensor and made.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()


def _device_of(tensor):
    """What it says it is on; of an unknown side the device, as nearly all that C++ makes is there."""
    return CPU if vars(tensor).get("_side") == HOST else torch.device("meta") if tensor.is_meta else ON_DEVICE


def _non_blocking(args, kwargs):
    return bool(kwargs.get("non_blocking") or any(each is True for each in args[2:3]))


class Properties:
    name, total_memory, major, minor = NAME, MEMORY_BYTES, 9, 0

    def __init__(self, device):
        self.uuid = uuid(device)


def _index_of(device):
    return (device.index or 0) if isinstance(device, torch.device) else int(device or 0)


def _play_the_device(count):
    """`torch.cuda`, by its names."""
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
    """Those of `torch.cuda` by their names."""
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
"""By a process group's method, which argument it sends and which it receives."""


def _play_nccl():
    """Process groups of gloo, which take themselves for NCCL's and note every call."""
    d = dist.distributed_c10d
    init, new_group, barrier = d.init_process_group, d.new_group, d.barrier

    def init_process_group(backend=None, *args, device_id=None, **kwargs):
        carried = {("nccl", "cuda"): "gloo", ("fake", None): "fake"}
        return init(carried[backend, getattr(device_id, "type", None)], *args, **kwargs)

    def new_group_of_gloo(ranks=None, timeout=None, backend=None, *args, device_id=None, **kwargs):
        return new_group(ranks, timeout, "gloo" if backend else None, *args, **kwargs)

    def barrier_of_gloo(group=None, async_op=False, device_ids=None):
        return barrier(group, async_op)

    for module in (dist, d):
        module.init_process_group = init_process_group
        module.new_group = new_group_of_gloo
        module.barrier = barrier_of_gloo
    init_mesh = dist.device_mesh.init_device_mesh

    def mesh_of_the_cpu(device_type, *args, **kwargs):
        return init_mesh(moved(device_type), *args, **kwargs)

    d._get_object_coll_device = lambda _=None: "cuda"
    parallel = DistributedDataParallel.__init__

    def on_a_gpu(self, module, device_ids=None, output_device=None, **kwargs):
        assert device_ids in (None, [CUDA.device]), device_ids
        parallel(self, module, **kwargs)

    DistributedDataParallel.__init__ = on_a_gpu
    for module in (dist, dist.device_mesh, bench.ranks.groups):
        module.init_device_mesh = mesh_of_the_cpu
    _fully_shard._get_device_from_mesh = lambda _: ON_DEVICE


def _note_calls():
    """What is handed to process groups, and when it is waited for."""
    for name, which in SENT_AND_RECEIVED.items():
        setattr(ProcessGroup, name, _noted(name, getattr(ProcessGroup, name), *which))
    for kind in (Work, PythonCallbackWork):
        kind.wait = _waited(kind.wait)


def _waited(wait):
    def waited(work, *args):
        CUDA.in_flight.pop(work, None)
        return wait(work, *args)

    return waited


def _noted(name, method, sent, received):
    def call(group, *args, **kwargs):
        gives, takes = (
            [] if which is None or len(args) <= which else [*tensors_in(args[which])]
            for which in (sent, received)
        )
        if any(vars(each).get("_side") == HOST for each in (*gives, *takes)):
            raise RuntimeError(f"No backend type associated with device type cpu ({name})")
        CUDA.check(name, gives)
        peer = args[1] if name in ("send", "recv") else None
        sizes = [each.numel() for each in (takes if sent is None else gives)]
        ranks = dist.get_process_group_ranks(group)
        CUDA.calls.append([group.group_name, ranks, name, peer, sizes if name != "barrier" else []])
        work = method(group, *args, **kwargs)
        if work is not None:
            CUDA.in_flight[work] = Flight(name, takes, gives)
        return work

    return call


def _play_autograd():
    """Backward runs Python, too, with no mode on; autocast and its questions are those of the CPU."""
    engine = torch.autograd._engine_run_backward

    def run(*args, **kwargs):
        with OnDevice():
            return engine(*args, **kwargs)

    torch.autograd._engine_run_backward = torch.autograd.graph._engine_run_backward = run
    autocast = torch.amp.autocast_mode.autocast
    enter = autocast.__init__
    autocast.__init__ = lambda self, device_type, *args, **kwargs: enter(
        self, moved(device_type), *args, **kwargs
    )
    checkpoint = torch.utils.checkpoint  # which compares tensors that a mode has seen with others
    checkpoint._allowed_determinism_checks_to_fns["default"] = lambda x: {"shape": x.shape, "dtype": x.dtype}
    grouped = torch._C._group_tensors_by_device_and_dtype

    def grouped_on_device(*args):
        of_device = grouped(*args).items()
        return {(_device_of(lists[0][0]), dtype): (lists, rest) for (_, dtype), (lists, rest) in of_device}

    torch._C._group_tensors_by_device_and_dtype = grouped_on_device
    is_enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    torch.is_autocast_enabled = lambda device="cpu": is_enabled(moved(device))
    torch.get_autocast_dtype = lambda device: dtype(moved(device))


def _play_the_profiler():
    """A trace of the CPU's operators, each of which has launched a kernel."""
    start, export = profile.__init__, profile.export_chrome_trace

    def without_cuda(self, *args, activities=None, **kwargs):
        activities = [each for each in activities or () if each is not ProfilerActivity.CUDA]
        start(self, *args, activities=activities, **kwargs)

    def with_kernels(self, path, *args, **kwargs):
        export(self, path, *args, **kwargs)
        trace = json.loads(Path(path).read_text())
        trace["traceEvents"] += [*_kernels(trace["traceEvents"])]
        Path(path).write_text(json.dumps(trace))

    profile.__init__, profile.export_chrome_trace = without_cuda, with_kernels


def _kernels(events):
    """Of each outermost operator a launch, and a kernel or copy at once; of each collective one of NCCL's.

    Of a batch of sends and receives there is one kernel, which is launched after the last of them.
    """
    operators = [each for each in events if each.get("cat") == "cpu_op" and each["ph"] == "X"]
    end, batches = {}, {}
    for each in sorted(operators, key=lambda each: (each["ts"], -each["dur"])):
        name, thread, stop = each["name"], each["tid"], each["ts"] + each["dur"]
        kind = COLLECTIVES[name].kind if name in COLLECTIVES else None
        if kind in ("send", "recv"):
            batches[thread] = {**each, "ts": stop + AFTER_US, "dur": 1}
        elif kind is not None:
            yield from _launched(each, f"ncclDevKernel_{kind}", "kernel")
        elif name.startswith("aten::") and each["ts"] >= end.get(thread, 0):
            end[thread] = stop
            if thread in batches:
                yield from _launched(batches.pop(thread), "ncclDevKernel_SendRecv", "kernel")
            yield from _launched(each, name, "gpu_memcpy" if name == "aten::copy_" else "kernel")


def _launched(operator, name, category):
    """The launch, and what it launched."""
    number = next(LAUNCHES)
    both = {"ph": "X", "pid": operator["pid"], "ts": operator["ts"], "args": {"correlation": number}}
    yield {**both, "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": operator["tid"], "dur": 0}
    is_noted = name.startswith("nccl") and not name.endswith("SendRecv")
    notes = {"In msg nelems": 1, "dtype": "Float"} if is_noted else {}
    args = {"correlation": number, **notes}
    yield {**both, "cat": category, "name": name, "tid": 7, "dur": operator["dur"], "args": args}


LAUNCHES = itertools.count()
AFTER_US = 0.01
"""How long after the last call of a batch its kernel is launched."""


def _count_in_timed_steps():
    """From the first mark of a step to the second."""
    mark_time = StepClock.mark

    def marked(clock):
        CUDA.is_counting = False
        mark_time(clock)
        CUDA.is_counting = len(clock._marks) == 1
        CUDA.steps += CUDA.is_counting

    StepClock.mark = marked


def install(job):
    """Play CUDA for the rest of this process."""
    count = job.cell.cluster.world_size
    sys.modules["pynvml"] = FakeNvml(count)
    _play_the_device(count)
    _play_nccl()
    _note_calls()
    _play_autograd()
    _play_the_profiler()
    _count_in_timed_steps()
    OnDevice().__enter__()


def played(entry, job, log):
    """A rank's life on the fake, `entry` or else the cell's passes; what it noted is left in its folder."""
    install(job)
    try:
        return (entry or run_cell)(job, log)
    finally:
        notes = json.dumps(CUDA.notes())
        (job.folder / NOTES.format(rank=job.rank)).write_text(notes)


@contextlib.contextmanager
def gpus_played(launcher):
    """While it lasts, each rank that the launcher starts for a GPU is on the fake, of which NVML knows two.

    Records have the provenance `synthetic`.
    """
    run = launcher.run

    def run_on_fake(self, cell, place, *, entry=None, **named):
        if cell.cluster.device == "cuda":
            entry = partial(played, entry)
        return run(cell, place, entry=entry, **named)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(launcher), "run", run_on_fake)
        patched.setitem(sys.modules, "pynvml", FakeNvml(2))
        for name in ("measure", "replay"):
            patched.setitem(MODES, name, replace(MODES[name], provenance=Provenance.SYNTHETIC))
        patched.setattr("bench.common.environment.torch_cuda", lambda: "13.0")
        this_machine.cache_clear()
        yield
    this_machine.cache_clear()


UNEVEN = {"alltoall", "alltoall_base", "gather", "scatter"}
"""Collectives of which ranks may hand over unequal parts."""


def notes_of(folder):
    """What each rank of a cell noted, by rank."""
    paths = sorted(folder.glob(NOTES.format(rank="*")), key=lambda path: int(path.stem.rpartition("_")[2]))
    return [json.loads(path.read_text()) for path in paths]


def problems(notes):
    """Every fault that a rank noted, and each group's first call that is not the same on all its ranks."""
    own = [f"rank {rank}: {fault}" for rank, each in enumerate(notes) for fault in each["faults"]]
    return [*own, *_out_of_order(notes), *_unpaired(notes)]


def _out_of_order(notes):
    groups = defaultdict(dict)
    for rank, each in enumerate(notes):
        for name, ranks, kind, peer, sizes in each["calls"]:
            made = groups[name, tuple(ranks)].setdefault(rank, [])
            if peer is None:
                made.append((kind, None if kind in UNEVEN else tuple(sizes)))
    for (name, ranks), by_rank in groups.items():
        for number, calls in enumerate(itertools.zip_longest(*(by_rank.get(rank, []) for rank in ranks))):
            if len({*calls}) > 1:
                told = ", ".join(f"{each} on rank {rank}" for rank, each in zip(ranks, calls, strict=True))
                yield f"call {number} of group {name} is {told}"
                break


def _unpaired(notes):
    sent, received = defaultdict(list), defaultdict(list)
    for rank, each in enumerate(notes):
        for name, ranks, kind, peer, sizes in each["calls"]:
            if kind == "send":
                sent[name, rank, ranks[peer]].append(sizes)
            elif kind == "recv":
                received[name, ranks[peer], rank].append(sizes)
    for pair in {**sent, **received}:
        if sent[pair] != received[pair]:
            name, source, target = pair
            told = f"which receives {received[pair]}, in group {name}"
            yield f"rank {source} sends {sent[pair]} to rank {target}, {told}"
