"""Every collective and point-to-point call of a rank, with its purpose and the bytes it hands over.

Payload, not wire: what a rank sends to others if each byte travels once. An algorithm may send more (gloo
has no reduce-scatter and all-reduces instead).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.attention.boundary import AttentionWatch

SMALL_BYTES = 1024
"""An all-reduce of less carries counts, losses and norms; more are gradients."""


@dataclass(frozen=True, slots=True)
class Collective:
    """How to read one operator: its kind, which argument is sent, which share of that leaves the rank.

    `splits` is the argument that says how much goes to each rank, where it need not be the same.
    """

    kind: str
    sent: int
    share: Callable[[int], float]
    splits: int | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """One call of this rank; `sent_bytes` is payload."""

    kind: str
    purpose: str
    group_size: int
    sent_bytes: int


def _to_each_other(size: int) -> float:
    return (size - 1) / size


def _whole_to_each_other(size: int) -> float:
    return size - 1


def _there_and_back(size: int) -> float:
    return 2 * (size - 1) / size


def _once(size: int) -> float:
    return min(1, size - 1)


_ALL_TO_ALL = Collective("all_to_all", 1, _to_each_other)
_ALL_GATHER = Collective("all_gather", 1, _whole_to_each_other)
_REDUCE_SCATTER = Collective("reduce_scatter", 1, _to_each_other)
COLLECTIVES: Mapping[str, Collective] = {
    "c10d::alltoall_base_": _ALL_TO_ALL,
    "c10d::_allgather_base_": _ALL_GATHER,
    "c10d::allgather_": _ALL_GATHER,
    "c10d::_reduce_scatter_base_": _REDUCE_SCATTER,
    "c10d::reduce_scatter_": _REDUCE_SCATTER,
    "c10d::allreduce_": Collective("all_reduce", 0, _there_and_back),
    "c10d::broadcast_": Collective("broadcast", 0, _once),
    "c10d::send": Collective("send_recv", 0, _once),
    # torch's functional collectives, which context parallel and DTensor use.
    "_c10d_functional::all_to_all_single": Collective("all_to_all", 0, _to_each_other, splits=2),
    "_c10d_functional::all_gather_into_tensor": Collective("all_gather", 0, _whole_to_each_other),
    # DeepSpeed hides its exchange in an operator of its own; the c10d call in it is out of sight.
    "deepspeed::dim_zero_all_to_all": Collective("all_to_all", 0, _to_each_other),
}
PURPOSES: Mapping[str, str] = {
    "all_gather": "parameters",
    "broadcast": "parameters",
    "reduce_scatter": "gradients",
    "all_reduce": "gradients",
}


class CommunicationTap(TorchDispatchMode):
    """While it is on, `calls` grows in the order this rank makes them. Adds no synchronisation."""

    def __init__(self, watch: AttentionWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch
        self.calls: list[Call] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type[Any]],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives on local tensors come by one by one
        collective = COLLECTIVES.get(func.name().partition(".")[0])
        if collective is not None:
            self.calls.append(self._call(collective, args))
        return func(*args, **(kwargs or {}))

    def sent_bytes(self) -> dict[str, int]:
        """Payload bytes by purpose."""
        totals: defaultdict[str, int] = defaultdict(int)
        for call in self.calls:
            totals[call.purpose] += call.sent_bytes
        return dict(totals)

    def calls_by_kind(self) -> dict[str, int]:
        """How many calls were made: `attention all_to_all` and so on."""
        return dict(Counter(f"{call.purpose} {call.kind}" for call in self.calls))

    def _call(self, collective: Collective, args: Sequence[Any]) -> Call:
        group = _group(args)
        size, handed_bytes = group.size(), _bytes(args[collective.sent])
        share = collective.share(size)
        if collective.splits is not None:
            splits = args[collective.splits]
            share = 1 - splits[group.rank()] / sum(splits)
        purpose = PURPOSES.get(collective.kind, "other")
        if self.watch.is_inside:
            purpose = "attention"
        elif collective.kind == "all_reduce" and handed_bytes < SMALL_BYTES:
            purpose = "data_and_loss"
        return Call(collective.kind, purpose, size, round(handed_bytes * share))


def _bytes(handed: Any) -> int:
    if isinstance(handed, Tensor):
        return handed.nbytes
    return sum(map(_bytes, handed)) if isinstance(handed, list | tuple) else 0


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    for arg in args:
        if isinstance(arg, torch.ScriptObject):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, str):
            return _resolve_process_group(GroupName(arg))
    raise TypeError("a collective without a group")
