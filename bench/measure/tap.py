"""Every collective and point-to-point call of a rank, its purpose, its ranks and the bytes it hands over.

Payload, not wire: what a rank sends to others if each byte travels once. An algorithm may send more (gloo
has no reduce-scatter and all-reduces instead).
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
from bench.common.kept_errors import KeptErrors
from bench.measure.calls import SHARE_OF_KIND, Collective, CollectiveCall, collective_of, purpose_of

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName  # a name that torch had not always


class CommunicationTap(TorchDispatchMode):
    """While it is on, `calls` grows in the order this rank makes them.

    It adds no synchronisation and no collective, but some 5 us to every operator.
    """

    def __init__(self, watch: AttentionWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch
        self.errors = KeptErrors()
        self.calls: list[CollectiveCall] = []
        self._counts: Counter[tuple[str, str, tuple[int, ...]]] = Counter()

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What is compiled stays compiled: under any other mode torch runs it operator by operator."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type[Any]],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its collectives on local tensors come by one by one
        with self.errors:
            collective = collective_of(func.name().partition(".")[0])
            if collective is not None:
                self.calls.append(self._call(collective, args))
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self.errors.raise_first()

    def sent_bytes(self) -> dict[str, int]:
        """Payload bytes by purpose."""
        totals: defaultdict[str, int] = defaultdict(int)
        for call in self.calls:
            totals[call.purpose] += call.sent_bytes
        return dict(totals)

    def calls_by_kind(self) -> dict[str, int]:
        """How many calls were made: `attention all_to_all` and so on."""
        return dict(Counter(f"{call.purpose} {call.kind}" for call in self.calls))

    def _call(self, collective: Collective, args: Sequence[Any]) -> CollectiveCall:
        arrival_ns = time.monotonic_ns()
        group = _group(args)
        ranks = tuple(dist.get_process_group_ranks(group))
        members = ranks
        if collective.peer is not None:
            ends = group.rank(), args[collective.peer]
            members = tuple(ranks[end] for end in (ends if collective.kind == "send" else ends[::-1]))
        counted = collective.kind, group.group_name, members
        ordinal = self._counts[counted]
        self._counts[counted] += 1
        handed_bytes = _bytes(args[collective.sent])
        return CollectiveCall(
            kind=collective.kind,
            purpose=purpose_of(collective.kind, handed_bytes, in_attention=self.watch.is_inside),
            group=group.group_name,
            members=members,
            ordinal=ordinal,
            sent_bytes=round(handed_bytes * _share_sent(collective, args, group)),
            arrival_ns=arrival_ns,
            received_bytes=handed_bytes if collective.kind == "recv" else 0,
        )


def _share_sent(collective: Collective, args: Sequence[Any], group: dist.ProcessGroup) -> float:
    """The share of what this rank hands over that leaves it."""
    if collective.root is not None and args[collective.root] == group.rank():
        return 0
    splits = [] if collective.splits is None else args[collective.splits]
    sizes = [_bytes(part) if isinstance(part, Tensor) else part for part in splits]
    if any(sizes):
        return 1 - sizes[group.rank()] / sum(sizes)
    return SHARE_OF_KIND[collective.kind](group.size()) if collective.kind in SHARE_OF_KIND else 0


def _bytes(handed: Any) -> int:
    if isinstance(handed, Tensor):
        return handed.nbytes
    return sum(map(_bytes, handed)) if isinstance(handed, list | tuple) else 0


def group_named(name: str) -> dist.ProcessGroup:
    """The group of this rank that has this name, as calls and traces give it."""
    return _resolve_process_group(cast("GroupName", name))


def _group(args: Sequence[Any]) -> dist.ProcessGroup:
    """The last argument that is a group or names one: the reduction is named before the group is."""
    for arg in reversed(args):
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg)
        if isinstance(arg, str):
            return group_named(arg)
    raise TypeError("a collective without a group")
