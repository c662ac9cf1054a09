"""A process group in which one rank exists; what the others would send is played.

torch's `fake` backend says which rank this is, and makes groups and meshes. Collectives are operators of
`c10d`, and their kernels are replaced here. Every caller ends in one of these operators (Python, DDP's C++,
functional collectives, DeepSpeed), and the communication tap and the memory tracker see the calls of a real
rank.

A played collective copies this rank's numbers to where those of other ranks would arrive, on the stream of
the caller. So sizes, dtypes, allocations and copies within the device are those of a real rank, and no time
passes for a link. torch does not document this: tests/bench/ranks/test_played_group.py tries what is used.
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
Copy = Callable[..., None]
"""Moves numbers as a collective does; it is given the arguments of the operator."""


def join_alone(rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
    """Make the default process group: this rank of `world_size`, of which no other exists. Once a process."""
    play_collectives(device)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=HashStore(), timeout=timeout)


@cache
def play_collectives(device: torch.device) -> Library:
    """Replace the CPU and CUDA kernels of all collectives, for the life of the process."""
    library = Library("c10d", "IMPL")
    for name, copy in {**COPIES, **_sends_and_receives()}.items():
        for key in ("CPU", "CUDA"):
            library.impl(name, _kernel(name, copy, device), key)
    return library


def _kernel(name: str, copy: Copy, device: torch.device) -> Callable[..., Any]:
    """Return the kernel of an operator, which gives a handle and, where the operator does so, its outputs."""
    returns_outputs = len(getattr(torch.ops.c10d, name).default._schema.returns) > 1

    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():  # autograd sees no writes of real backends either
            copy(*args)
        handle = _with_future(args[0]) if name in READ_FROM_FUTURE else _handle([*_tensors(args)], device)
        return (args[0], handle) if returns_outputs else handle

    return run


def _all_reduce(tensors: Tensors, box: Any, op: Any, *_: Any) -> None:
    """Sum equal numbers of all ranks; an average, the least or the largest of them are as they were."""
    for tensor in tensors if op.op() == dist.ReduceOp.SUM else ():
        tensor.mul_(_group(box).size())


def _reduce(tensors: Tensors, box: Any, op: Any, root: int, *_: Any) -> None:
    if _group(box).rank() == root:
        _all_reduce(tensors, box, op)


def _gather_into(outs: Any, owns: Any, box: Any, *_: Any) -> None:
    ranks = _group(box).size()
    for out, own in _pairs(outs, owns):
        out.view(ranks, -1).copy_(own.reshape(1, -1).expand(ranks, -1))


def _gather_parts(outs: Parts, owns: Tensors, *_: Any) -> None:
    for parts, own in zip(outs, owns, strict=False):  # on ranks that are not the root nothing arrives
        for part in parts:
            _fill(part, own)


def _gather_coalesced(outs: Parts, owns: Tensors, *_: Any) -> None:
    for parts in outs:
        _exchange(parts, owns)


def _reduce_scatter_from(outs: Any, wholes: Any, box: Any, op: Any, *_: Any) -> None:
    group = _group(box)
    for out, whole in _pairs(outs, wholes):
        _fill(out, whole.view(group.size(), -1)[group.rank()])
        _all_reduce([out], box, op)


def _reduce_scatter_parts(outs: Tensors, wholes: Parts, box: Any, op: Any, *_: Any) -> None:
    _scatter_parts(outs, wholes, box)
    _all_reduce(outs, box, op)


def _scatter_parts(outs: Tensors, wholes: Parts, box: Any, *_: Any) -> None:
    for out, parts in zip(outs, wholes, strict=False):  # ranks that are not the root have no parts
        _fill(out, parts[_group(box).rank()])


def _exchange(outs: Any, owns: Any, *_: Any) -> None:
    for out, own in _pairs(outs, owns):
        _fill(out, own)


def _nothing(*_: Any) -> None:
    """Leave all tensors as they are: what another rank would send is not known."""


def _sends_and_receives() -> dict[str, Copy]:
    """A receive is given the numbers of the last tensor of its group, size and dtype that was sent."""
    last: dict[tuple[str, int, torch.dtype], ref[Tensor]] = {}

    def send(tensors: Tensors, box: Any, *_: Any) -> None:
        for tensor in tensors:
            last[_group(box).group_name, tensor.numel(), tensor.dtype] = ref(tensor)

    def receive(tensors: Tensors, box: Any, *_: Any) -> None:
        for tensor in tensors:
            sent = last.get((_group(box).group_name, tensor.numel(), tensor.dtype), lambda: None)()
            if sent is not None:
                _fill(tensor, sent)
            elif tensor.is_floating_point():
                tensor.normal_()  # zeros take a GPU less power, and so less time
            else:
                tensor.zero_()

    return {"send": send, "recv_": receive, "recv_any_source_": receive}


COPIES: Mapping[str, Copy] = {
    "allreduce_": _all_reduce,
    "allreduce_coalesced_": _all_reduce,
    "reduce_": _reduce,
    "broadcast_": _nothing,
    "_allgather_base_": _gather_into,
    "allgather_into_tensor_coalesced_": _gather_into,
    "allgather_": _gather_parts,
    "allgather_coalesced_": _gather_coalesced,
    "gather_": _gather_parts,
    "_reduce_scatter_base_": _reduce_scatter_from,
    "reduce_scatter_tensor_coalesced_": _reduce_scatter_from,
    "reduce_scatter_": _reduce_scatter_parts,
    "scatter_": _scatter_parts,
    "alltoall_base_": _exchange,
    "alltoall_": _exchange,
    "barrier": _nothing,
}
"""Operators of `c10d` but for sends and receives."""
READ_FROM_FUTURE = frozenset({"allreduce_", "allreduce_coalesced_", "broadcast_"})
"""Operators whose result DDP reads from the future of the handle, without a wait."""


def _group(box: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(box)


def _pairs(outs: Any, owns: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield each output with its input, of two lists or of one tensor each."""
    return zip(outs, owns, strict=True) if isinstance(outs, list) else iter([(outs, owns)])


def _fill(out: Tensor, own: Tensor) -> None:
    """Copy the numbers of `own`, from the start again where `out` has more of them."""
    if out.numel() == own.numel():
        out.copy_(own.reshape(out.shape))
        return
    source = own.reshape(-1)
    for part in out.view(-1).split(max(1, source.numel())):
        part.copy_(source[: part.numel()])


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors among the arguments of an operator."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tensors(each)


def _handle(kept: list[Tensor], device: torch.device) -> Any:
    """Return a handle that keeps tensors alive until it is waited for, as those of gloo and NCCL do."""
    copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def wait(_timeout: Any) -> bool:
        if copied is not None:  # another stream may wait than the one that copied
            torch.cuda.current_stream(device).wait_event(copied)
        kept.clear()
        return True

    return PythonCallbackWork(wait).boxed()


def _with_future(tensors: Tensors) -> Any:
    future: Future[list[Tensor]] = Future(devices=[each.device for each in tensors[:1] if each.is_cuda])
    future.set_result([*tensors])
    return _create_work_from_future(future).boxed()
