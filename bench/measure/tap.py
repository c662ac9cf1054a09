"""Recorder of every collective and point-to-point call of a rank, with its purpose, its ranks and its bytes.

Bytes are payload: those that a rank sends to other ranks if every byte travels once. An algorithm may send
more: gloo, for example, has no reduce-scatter and all-reduces instead.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.attention.watch import AttentionWatch
from bench.common.deferred_errors import DeferredErrors
from bench.measure.calls import SHARE_OF_KIND, Collective, CollectiveCall, collective_of, purpose_of

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName  # older versions of torch do not have it


class CommunicationTap(TorchDispatchMode):
    """Dispatch mode that appends every communication call of this rank to `calls`.

    It synchronises nothing and adds no collective, but delays every operator by about 5 us.
    """

    def __init__(self, watch: AttentionWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch
        self.errors = DeferredErrors()
        self.calls: list[CollectiveCall] = []
        self._counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Keep compiled code compiled; under any other mode torch runs it operator by operator."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type[Any]],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the mode then sees the collectives of DTensor on local tensors
        with self.errors:
            collective = collective_of(func.name().partition(".")[0])
            if collective is not None:
                self.calls.append(self._call(collective, args))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.errors.raise_first()

    def sent_bytes(self) -> dict[str, int]:
        """Return the payload bytes of all calls by purpose."""
        totals: defaultdict[str, int] = defaultdict(int)
        for call in self.calls:
            totals[call.purpose] += call.sent_bytes
        return dict(totals)

    def calls_by_kind(self) -> dict[str, int]:
        """Return the number of calls by purpose and kind; keys are like `attention all_to_all`."""
        return dict(Counter(f"{call.purpose} {call.kind}" for call in self.calls))

    def _call(self, collective: Collective, args: Sequence[Any]) -> CollectiveCall:
        """Return the call with its members, bytes and arrival, and count it for its ordinal."""
        arrival_ns = time.monotonic_ns()
        group = _group(args)
        ranks = tuple(dist.get_process_group_ranks(group))
        members = ranks
        if collective.peer_arg is not None:
            this_and_peer = group.rank(), args[collective.peer_arg]
            from_to = this_and_peer if collective.kind == "send" else this_and_peer[::-1]
            members = tuple(ranks[end] for end in from_to)
        count_key = collective.kind, group.group_name, members
        ordinal = self._counts[count_key]
        self._counts[count_key] += 1
        payload_bytes = _tensor_bytes(args[collective.payload_arg])
        return CollectiveCall(
            kind=collective.kind,
            purpose=purpose_of(collective.kind, payload_bytes, in_attention=self.watch.is_inside),
            group=group.group_name,
            members=members,
            ordinal=ordinal,
            sent_bytes=round(payload_bytes * _sent_share(collective, args, group)),
            arrival_ns=arrival_ns,
            received_bytes=payload_bytes if collective.kind == "recv" else 0,
        )


def _sent_share(collective: Collective, args: Sequence[Any], group: dist.ProcessGroup) -> float:
    """Return the bytes that this rank sends to other ranks, as a share of the bytes passed to the call."""
    if collective.root_arg is not None and args[collective.root_arg] == group.rank():
        return 0
    splits = [] if collective.splits_arg is None else args[collective.splits_arg]
    sizes = [_tensor_bytes(part) if isinstance(part, Tensor) else part for part in splits]
    if any(sizes):
        return 1 - sizes[group.rank()] / sum(sizes)
    return SHARE_OF_KIND[collective.kind](group.size()) if collective.kind in SHARE_OF_KIND else 0


def _tensor_bytes(arg: Any) -> int:
    if isinstance(arg, Tensor):
        return arg.nbytes
    return sum(map(_tensor_bytes, arg)) if isinstance(arg, list | tuple) else 0


def process_group_by_name(name: str) -> dist.ProcessGroup:
    """Return the process group with this name, which calls and traces contain."""
    return _resolve_process_group(cast("GroupName", name))


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    """Return the process group of a call: its last argument that is a group or the name of a group.

    The last string is the group's name, because the name of the reduction stands before it.
    """
    for arg in reversed(args):
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, str):
            return process_group_by_name(arg)
    raise TypeError("this collective has no process group among its arguments")
