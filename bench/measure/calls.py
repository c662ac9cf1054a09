"""What a rank asks of others: calls, how an operator is read as one, and what it is for. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.training.messages import SMALL_BYTES

PURPOSES = ("attention", "parameters", "gradients", "data_and_loss", "other")
"""In the order in which time is booked where communication for two purposes is exposed at once."""

PURPOSE_OF_KIND: Mapping[str, str] = {
    "all_gather": "parameters",
    "broadcast": "parameters",
    "reduce_scatter": "gradients",
    "all_reduce": "gradients",
    "reduce": "gradients",
}

SHARE_OF_KIND: Mapping[str, Callable[[int], float]] = {
    "all_to_all": lambda size: (size - 1) / size,
    "all_gather": lambda size: size - 1,
    "reduce_scatter": lambda size: (size - 1) / size,
    "all_reduce": lambda size: 2 * (size - 1) / size,
    "reduce": lambda size: min(1, size - 1),
    "gather": lambda size: min(1, size - 1),
    "broadcast": lambda size: min(1, size - 1),
    "scatter": lambda size: (size - 1) / size,  # all but the root hand over nothing
    "send": lambda size: min(1, size - 1),
}
"""Which share of what a rank hands over leaves it, in a group of so many ranks; nothing of other kinds."""

Meeting = tuple[str, str, tuple[int, ...], int]


@dataclass(frozen=True, slots=True)
class Collective:
    """How to read one operator: its kind, and which argument is sent.

    `peer` is the argument that names the other rank, by its place in the group, for a send or receive.
    `splits` is the argument that says how much goes to each rank, or is a tensor for each; where it is
    empty, all get the same. `root` is the argument that names the one rank that sends nothing.
    """

    kind: str
    sent: int
    peer: int | None = None
    splits: int | None = None
    root: int | None = None


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One call of this rank.

    `group` is the group's name, the same on all its ranks and of no other group. `members` are the global
    ranks that have to meet: those of the group, or sender and receiver. `ordinal` counts from 0 the calls of
    this kind among these members in this group. `sent_bytes` is payload.
    `arrival_ns` is `time.monotonic_ns`, one clock for all ranks of a host and none across hosts.
    """

    kind: str
    purpose: str
    group: str
    members: tuple[int, ...]
    ordinal: int
    sent_bytes: int
    arrival_ns: int
    received_bytes: int = 0
    """Bytes that a receive takes in; 0 for other kinds."""

    @property
    def meeting(self) -> Meeting:
        """What the same call has in common on all its members: a send meets its receive."""
        kind = "send_recv" if self.kind in {"send", "recv"} else self.kind
        return kind, self.group, self.members, self.ordinal


def purpose_of(kind: str, handed_bytes: int, *, in_attention: bool) -> str:
    """What a call is for, from where it is made, its kind and its size."""
    if in_attention:
        return "attention"
    if kind in {"all_reduce", "reduce"} and handed_bytes < SMALL_BYTES:
        return "data_and_loss"
    return PURPOSE_OF_KIND.get(kind, "other")


_ALL_GATHER, _ALL_GATHER_OF_FIRST = Collective("all_gather", 1), Collective("all_gather", 0)
_REDUCE_SCATTER, _REDUCE_SCATTER_OF_FIRST = Collective("reduce_scatter", 1), Collective("reduce_scatter", 0)
_ALL_REDUCE = Collective("all_reduce", 0)
_BROADCAST = Collective("broadcast", 0)
_ALL_TO_ALL_OF_FIRST = Collective("all_to_all", 0)
COLLECTIVES: Mapping[str, Collective] = {
    "c10d::alltoall_base_": Collective("all_to_all", 1, splits=4),
    "c10d::alltoall_": Collective("all_to_all", 1, splits=1),
    "c10d::_allgather_base_": _ALL_GATHER,
    "c10d::allgather_": _ALL_GATHER,
    "c10d::allgather_coalesced_": _ALL_GATHER,
    "c10d::allgather_into_tensor_coalesced_": _ALL_GATHER,
    "c10d::_reduce_scatter_base_": _REDUCE_SCATTER,
    "c10d::reduce_scatter_": _REDUCE_SCATTER,
    "c10d::reduce_scatter_tensor_coalesced_": _REDUCE_SCATTER,
    "c10d::allreduce_": _ALL_REDUCE,
    "c10d::allreduce_coalesced_": _ALL_REDUCE,
    "c10d::reduce_": Collective("reduce", 0, root=3),
    "c10d::gather_": Collective("gather", 1, root=3),
    "c10d::broadcast_": _BROADCAST,
    "c10d::scatter_": Collective("scatter", 1),
    "c10d::send": Collective("send", 0, peer=2),
    "c10d::recv_": Collective("recv", 0, peer=2),
    "c10d::recv_any_source_": Collective("recv_any_source", 0),  # its sender is found out later
    "c10d::barrier": Collective("barrier", 0),
    # These hide the c10d call that they make: DTensor's, and DeepSpeed's exchange.
    "_c10d_functional::all_reduce": _ALL_REDUCE,
    "_c10d_functional::all_reduce_": _ALL_REDUCE,
    "_c10d_functional::all_reduce_coalesced": _ALL_REDUCE,
    "_c10d_functional::all_reduce_coalesced_": _ALL_REDUCE,
    "_c10d_functional::broadcast": _BROADCAST,
    "_c10d_functional::broadcast_": _BROADCAST,
    "_c10d_functional::all_gather_into_tensor": _ALL_GATHER_OF_FIRST,
    "_c10d_functional::all_gather_into_tensor_coalesced": _ALL_GATHER_OF_FIRST,
    "_c10d_functional::all_gather_into_tensor_out": _ALL_GATHER_OF_FIRST,
    "_c10d_functional::reduce_scatter_tensor": _REDUCE_SCATTER_OF_FIRST,
    "_c10d_functional::reduce_scatter_tensor_coalesced": _REDUCE_SCATTER_OF_FIRST,
    "_c10d_functional::reduce_scatter_tensor_out": _REDUCE_SCATTER_OF_FIRST,
    "_c10d_functional::all_to_all_single": Collective("all_to_all", 0, splits=2),
    "_dtensor::shard_dim_alltoall": _ALL_TO_ALL_OF_FIRST,
    "deepspeed::dim_zero_all_to_all": _ALL_TO_ALL_OF_FIRST,
}
"""Every operator whose bytes are counted."""

WITHOUT_PAYLOAD = frozenset({
    "c10d::check_for_nan",
    "c10d::monitored_barrier_",  # not counted as a barrier either: to gloo it is sends and receives
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "_dtensor::mesh_get_process_group",
})  # fmt: skip
"""Operators that send nothing of anybody's."""

COMMUNICATION = ("c10d::", "_c10d_functional::", "_dtensor::", "symm_mem::")
"""How the names of torch's operators begin that may send. Those of `c10d_functional` and
`_c10d_functional_autograd` are not among them: each makes a call of `_c10d_functional`, which is seen."""


def collective_of(operator: str) -> Collective | None:
    """How to read this operator; None where it sends nothing.

    Raises NotImplementedError for one that may send and is in no table: what it carries would be missing.
    Of torch 2.13 these are point-to-point calls of compiled code and copies through symmetric memory.
    """
    found = COLLECTIVES.get(operator)
    if found is None and operator.startswith(COMMUNICATION) and operator not in WITHOUT_PAYLOAD:
        raise NotImplementedError(f"the bytes that {operator} sends cannot be counted")
    return found
