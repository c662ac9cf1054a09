"""Process group for a replay, in which only one rank exists and data from other ranks are replaced.

torch's `fake` backend provides the rank's number, groups and meshes. Collectives are operators of `c10d`,
whose kernels this module replaces. All callers (Python, DDP's C++, functional collectives, DeepSpeed) end in
these operators, so that the hooks that record communication and memory see the calls of a real rank.

A replaced collective copies this rank's numbers to the places where data of other ranks would arrive, on the
stream of the caller. Sizes, dtypes, allocations and copies within the device are therefore those of a real
rank, and communication takes no time. torch does not document these operators;
tests/bench/ranks/test_replay_group.py checks those in use.

Functions that replace an operator take the operator's arguments. `box` is the process group, boxed as a
TorchScript object; `outs` and `inputs` are lists of tensors, or single tensors in some operators. A tensor
that holds the parts of all ranks is a whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import (  # type: ignore[attr-defined]
    HashStore,
    PythonCallbackWork,
    _create_work_from_future,
)
from torch.futures import Future
from torch.library import Library
from torch.testing._internal.distributed import fake_pg  # noqa: F401  registers the backend

Tensors = Sequence[Tensor]
Parts = Sequence[Tensors]
"""One list for each tensor of a call, with a part of it for each rank."""
Copy = Callable[..., None]
"""Function that takes the arguments of an operator and writes its outputs."""


def join_replay_group(rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
    """Create the default process group, with this process as its only rank; call this once."""
    replace_collectives(device)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=HashStore(), timeout=timeout)


@cache
def replace_collectives(device: torch.device) -> Library:
    """Replace the CPU and CUDA kernels of all collectives for the lifetime of the process."""
    library = Library("c10d", "IMPL")
    for name, copy in {**COPIES, **_sends_and_receives()}.items():
        for key in ("CPU", "CUDA"):
            library.impl(name, _kernel(name, copy, device), key)
    return library


def _kernel(name: str, copy: Copy, device: torch.device) -> Callable[..., Any]:
    """Return a kernel that calls `copy` and returns what the operator `name` returns.

    Every operator returns a handle (a c10d Work) to wait for; some return their outputs, too.
    """
    returns_outputs = len(getattr(torch.ops.c10d, name).default._schema.returns) > 1

    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():  # hidden from autograd, as with real backends
            copy(*args)
        handle = (
            _handle_with_future(args[0]) if name in READ_FROM_FUTURE else _handle([*_tensors(args)], device)
        )
        return (args[0], handle) if returns_outputs else handle

    return run


def _all_reduce(tensors: Tensors, box: Any, op: Any, *_: Any) -> None:
    """Reduce in place as if all ranks had equal numbers: only a sum changes them."""
    for tensor in tensors if op.op() == dist.ReduceOp.SUM else ():
        tensor.mul_(_group(box).size())


def _reduce(tensors: Tensors, box: Any, op: Any, root: int, *_: Any) -> None:
    if _group(box).rank() == root:
        _all_reduce(tensors, box, op)


def _gather_into(outs: Any, inputs: Any, box: Any, *_: Any) -> None:
    ranks = _group(box).size()
    for out, source in _pairs(outs, inputs):
        out.view(ranks, -1).copy_(source.reshape(1, -1).expand(ranks, -1))


def _gather_parts(outs: Parts, inputs: Tensors, *_: Any) -> None:
    for parts, source in zip(outs, inputs, strict=False):  # only the root has outputs
        for part in parts:
            _fill(part, source)


def _gather_coalesced(outs: Parts, inputs: Tensors, *_: Any) -> None:
    for parts in outs:
        _all_to_all(parts, inputs)


def _reduce_scatter_from(outs: Any, wholes: Any, box: Any, op: Any, *_: Any) -> None:
    group = _group(box)
    for out, whole in _pairs(outs, wholes):
        _fill(out, whole.view(group.size(), -1)[group.rank()])
        _all_reduce([out], box, op)


def _reduce_scatter_parts(outs: Tensors, wholes: Parts, box: Any, op: Any, *_: Any) -> None:
    _scatter_parts(outs, wholes, box)
    _all_reduce(outs, box, op)


def _scatter_parts(outs: Tensors, wholes: Parts, box: Any, *_: Any) -> None:
    for out, parts in zip(outs, wholes, strict=False):  # only the root has inputs
        _fill(out, parts[_group(box).rank()])


def _all_to_all(outs: Any, inputs: Any, *_: Any) -> None:
    for out, source in _pairs(outs, inputs):
        _fill(out, source)


def _skip(*_: Any) -> None:
    """Leave all tensors unchanged, as data of another rank are unknown."""


def _sends_and_receives() -> dict[str, Copy]:
    """Return sends and receives. A receive gets the last tensor sent with its group, size and dtype."""
    last_sent: dict[tuple[str, int, torch.dtype], ref[Tensor]] = {}

    def send(tensors: Tensors, box: Any, *_: Any) -> None:
        for tensor in tensors:
            last_sent[_group(box).group_name, tensor.numel(), tensor.dtype] = ref(tensor)

    def receive(tensors: Tensors, box: Any, *_: Any) -> None:
        for tensor in tensors:
            sent = last_sent.get((_group(box).group_name, tensor.numel(), tensor.dtype), lambda: None)()
            if sent is not None:
                _fill(tensor, sent)
            elif tensor.is_floating_point():
                tensor.normal_()  # a GPU computes faster with zeros, which take less power
            else:
                tensor.zero_()

    return {"send": send, "recv_": receive, "recv_any_source_": receive}


COPIES: Mapping[str, Copy] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_": _reduce,
    "broadcast_": _skip,
    "_allgather_base_": _gather_into,
    "allgather_into_tensor_coalesced_": _gather_into,
    "allgather_": _gather_parts,
    "allgather_coalesced_": _gather_coalesced,
    "gather_": _gather_parts,
    "_reduce_scatter_base_": _reduce_scatter_from,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_from,
    "reduce_scatter_": _reduce_scatter_parts,
    "scatter_": _scatter_parts,
    "alltoall_base_": _all_to_all,
    "alltoall_": _all_to_all,
    "barrier": _skip,
}
"""Replacements for the operators of `c10d`, except sends and receives."""
READ_FROM_FUTURE = frozenset({"allreduce_", "allreduce_coalesced_", "broadcast_"})
"""Operators whose result DDP reads from the handle's future without waiting for it."""


def _group(box: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(box)


def _pairs(outs: Any, inputs: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Return pairs of output and input, for two lists or two tensors."""
    return zip(outs, inputs, strict=True) if isinstance(outs, list) else iter([(outs, inputs)])


def _fill(out: Tensor, source: Tensor) -> None:
    """Copy the numbers of `source` to `out`, repeating or cutting them if `out` has another size."""
    if out.numel() == source.numel():
        out.copy_(source.reshape(out.shape))
        return
    numbers = source.reshape(-1)
    for part in out.view(-1).split(max(1, numbers.numel())):
        part.copy_(numbers[: part.numel()])


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors among the arguments of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _handle(tensors: list[Tensor], device: torch.device) -> Any:
    """Return a handle that keeps tensors alive until a caller waits for it, like those of gloo and NCCL."""
    copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(_timeout: Any) -> bool:
        if copied is not None:  # the waiting stream may differ from the one that copied
            torch.cuda.current_stream(device).wait_event(copied)
        tensors.clear()
        return True

    return PythonCallbackWork(wait).boxed()


def _handle_with_future(tensors: Tensors) -> Any:
    """Return a finished handle whose future already holds the tensors."""
    future: Future[list[Tensor]] = Future(devices=[tensor.device for tensor in tensors[:1] if tensor.is_cuda])
    future.set_result([*tensors])
    return _create_work_from_future(future).boxed()
