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

from collections.abc import Callable, Sequence
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
Handle = Any
"""A `Work` as operators of `c10d` return it."""


def join_alone(rank: int, world_size: int, device: torch.device, timeout: timedelta) -> None:
    """Make the default process group: this rank of `world_size`, of which no other exists. Once a process."""
    play_collectives(device)
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=HashStore(), timeout=timeout)


@cache
def play_collectives(device: torch.device) -> Library:
    """Replace the CPU and CUDA kernels of all collectives, for the life of the process."""
    library, kernels = Library("c10d", "IMPL"), PlayedCollectives(device)
    for name, kernel in kernels.by_operator().items():
        for key in ("CPU", "CUDA"):
            library.impl(name, _below_autograd(kernel), key)
    return library


def _below_autograd(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel with writes that autograd does not see, as those of real backends."""

    def run(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return kernel(*args)

    return run


class PlayedCollectives:
    """The kernels: a method for each operator of `c10d`, with the operator's name and arguments.

    `box` is the process group. Sums are this rank's numbers times the number of ranks, so that a mean over
    ranks keeps its size.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: dict[tuple[str, int, torch.dtype], ref[Tensor]] = {}
        """The last tensor sent, by group, size and dtype: a receive of the same is given its numbers."""

    def by_operator(self) -> dict[str, Callable[..., Any]]:
        """All kernels by the name of their operator."""
        others = {"by_operator", "_handle"}
        names = [name for name in vars(type(self)) if not name.startswith("__") and name not in others]
        return {name: getattr(self, name) for name in names}

    def allreduce_(self, tensors: Tensors, box: Any, op: Any, *_: Any) -> tuple[Tensors, Handle]:
        _scale(tensors, _factor(op, _group(box)))
        return tensors, _with_future(tensors)

    def allreduce_coalesced_(self, tensors: Tensors, box: Any, op: Any, *_: Any) -> Handle:
        return self.allreduce_(tensors, box, op)[1]

    def reduce_(self, tensors: Tensors, box: Any, op: Any, root: int, *_: Any) -> Handle:
        group = _group(box)
        _scale(tensors, _factor(op, group) if group.rank() == root else 1)
        return self._handle(tensors)

    def broadcast_(self, tensors: Tensors, *_: Any) -> tuple[Tensors, Handle]:
        """What another rank would send is not known: the tensors keep their numbers."""
        return tensors, _with_future(tensors)

    def _allgather_base_(self, out: Tensor, own: Tensor, box: Any, *_: Any) -> tuple[Tensor, Handle]:
        _gather(out, own, _group(box))
        return out, self._handle([out, own])

    def allgather_into_tensor_coalesced_(self, outs: Tensors, owns: Tensors, box: Any, *_: Any) -> Handle:
        for out, own in zip(outs, owns, strict=True):
            _gather(out, own, _group(box))
        return self._handle([*outs, *owns])

    def allgather_(self, outs: Sequence[Tensors], owns: Tensors, *_: Any) -> tuple[Sequence[Tensors], Handle]:
        for parts, own in zip(outs, owns, strict=True):
            for part in parts:
                _fill(part, own)
        return outs, self._handle([*owns, *(part for parts in outs for part in parts)])

    def allgather_coalesced_(self, outs: Sequence[Tensors], owns: Tensors, *_: Any) -> Handle:
        for parts in outs:
            for part, own in zip(parts, owns, strict=True):
                _fill(part, own)
        return self._handle([*owns, *(part for parts in outs for part in parts)])

    def gather_(self, outs: Sequence[Tensors], owns: Tensors, *_: Any) -> Handle:
        return self.allgather_(outs, owns)[1] if outs else self._handle(owns)

    def _reduce_scatter_base_(
        self, out: Tensor, whole: Tensor, box: Any, op: Any, *_: Any
    ) -> tuple[Tensor, Handle]:
        _reduce_scatter(out, whole, _group(box), op)
        return out, self._handle([out, whole])

    def reduce_scatter_tensor_coalesced_(
        self, outs: Tensors, wholes: Tensors, box: Any, op: Any, *_: Any
    ) -> Handle:
        for out, whole in zip(outs, wholes, strict=True):
            _reduce_scatter(out, whole, _group(box), op)
        return self._handle([*outs, *wholes])

    def reduce_scatter_(
        self, outs: Tensors, wholes: Sequence[Tensors], box: Any, op: Any, *_: Any
    ) -> tuple[Tensors, Handle]:
        group = _group(box)
        for out, parts in zip(outs, wholes, strict=True):
            _fill(out, parts[group.rank()])
        _scale(outs, _factor(op, group))
        return outs, self._handle([*outs, *(part for parts in wholes for part in parts)])

    def scatter_(self, outs: Tensors, wholes: Sequence[Tensors], box: Any, *_: Any) -> tuple[Tensors, Handle]:
        """On a rank that is not the root there are no parts: the tensors keep their numbers."""
        for out, parts in zip(outs, wholes, strict=False):
            _fill(out, parts[_group(box).rank()])
        return outs, self._handle(outs)

    def alltoall_base_(self, out: Tensor, own: Tensor, *_: Any) -> Handle:
        _fill(out, own)
        return self._handle([out, own])

    def alltoall_(self, outs: Tensors, owns: Tensors, *_: Any) -> tuple[Tensors, Handle]:
        for out, own in zip(outs, owns, strict=True):
            _fill(out, own)
        return outs, self._handle([*outs, *owns])

    def send(self, tensors: Tensors, box: Any, *_: Any) -> Handle:
        for tensor in tensors:
            self._sent[_group(box).group_name, tensor.numel(), tensor.dtype] = ref(tensor)
        return self._handle(tensors)

    def recv_(self, tensors: Tensors, box: Any, *_: Any) -> Handle:
        """Without a tensor that was sent, random numbers: zeros take a GPU less power, and so less time."""
        for tensor in tensors:
            sent = self._sent.get((_group(box).group_name, tensor.numel(), tensor.dtype), lambda: None)()
            if sent is not None:
                _fill(tensor, sent)
            elif tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.zero_()
        return self._handle(tensors)

    def recv_any_source_(self, tensors: Tensors, box: Any, *_: Any) -> Handle:
        return self.recv_(tensors, box)

    def barrier(self, *_: Any) -> Handle:
        return self._handle([])

    def _handle(self, tensors: Tensors) -> Handle:
        """The handle of a call, which keeps its tensors alive until it is waited for, as gloo and NCCL do."""
        kept, device = [*tensors], self._device
        copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

        def wait(_timeout: Any) -> bool:
            if copied is not None:  # whoever waits may be on another stream
                torch.cuda.current_stream(device).wait_event(copied)
            kept.clear()
            return True

        return PythonCallbackWork(wait).boxed()


def _group(box: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(box)


def _factor(op: Any, group: dist.ProcessGroup) -> int:
    """The sum of equal numbers of all ranks over one of them; an average, least or largest is as it was."""
    return group.size() if op.op() == dist.ReduceOp.SUM else 1


def _scale(tensors: Tensors, factor: int) -> None:
    for tensor in tensors:
        if factor != 1:
            tensor.mul_(factor)


def _gather(out: Tensor, own: Tensor, group: dist.ProcessGroup) -> None:
    out.view(group.size(), -1).copy_(own.reshape(1, -1).expand(group.size(), -1))


def _reduce_scatter(out: Tensor, whole: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    _fill(out, whole.view(group.size(), -1)[group.rank()])
    _scale([out], _factor(op, group))


def _fill(out: Tensor, own: Tensor) -> None:
    """Copy the numbers of `own`, from the start again where `out` has more of them."""
    if out.numel() == own.numel():
        out.copy_(own.view_as(out) if own.is_contiguous() else own.reshape(out.shape))
        return
    flat, source = out.view(-1), own.reshape(-1)
    for part in flat.split(max(1, source.numel())) if flat.numel() else ():
        part.copy_(source[: part.numel()])


def _with_future(tensors: Tensors) -> Handle:
    """The handle of a call whose caller reads the result from a future, as DDP does without a wait."""
    future: Future[list[Tensor]] = Future(devices=[each.device for each in tensors[:1] if each.is_cuda])
    future.set_result([*tensors])
    return _create_work_from_future(future).boxed()
