"""Collective and point-to-point calls, the operators that make them, and their purposes. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.training.messages import SMALL_BYTES

PURPOSES = ("attention", "parameters", "gradients", "data_and_loss", "other")
"""Purposes of communication. Time in which two are exposed at once counts for the earlier one here."""

PURPOSE_OF_KIND: Mapping[str, str] = {
    "all_gather": "parameters",
    "broadcast": "parameters",
    "reduce_scatter": "gradients",
    "all_reduce": "gradients",
    "reduce": "gradients",
}
"""Purpose of a large call outside attention, by the kind of the call."""

SHARE_OF_KIND: Mapping[str, Callable[[int], float]] = {
    "all_to_all": lambda size: (size - 1) / size,
    "all_gather": lambda size: size - 1,
    "reduce_scatter": lambda size: (size - 1) / size,
    "all_reduce": lambda size: 2 * (size - 1) / size,
    "reduce": lambda size: min(1, size - 1),
    "gather": lambda size: min(1, size - 1),
    "broadcast": lambda size: min(1, size - 1),
    "scatter": lambda size: (size - 1) / size,  # of the root; the other ranks pass nothing
    "send": lambda size: min(1, size - 1),
}
"""Share of the bytes passed to a call that a rank sends, as a function of the group's size, by kind of call.

Calls of a kind that is not listed send nothing.
"""

RendezvousKey = tuple[str, str, tuple[int, ...], int]
"""Kind, group, members and ordinal of a call: equal on all ranks that take part in it."""


@dataclass(frozen=True, slots=True)
class Collective:
    """Kind of an operator that communicates, and the positions of its arguments."""

    kind: str
    payload_arg: int
    """Position of the tensor, or tensors, that the rank sends or receives."""
    peer_arg: int | None = None
    """Position of the other rank of a send or receive, a number within the group."""
    splits_arg: int | None = None
    """Position of a list with the size, or the tensor, for each rank; the list is empty if all are equal."""
    root_arg: int | None = None
    """Position of the root's number. The root receives from all other ranks and sends nothing."""


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """One collective or point-to-point call of this rank."""

    kind: str
    purpose: str
    group: str
    """Name of the process group: equal on all its ranks, and different from that of any other group."""
    members: tuple[int, ...]
    """Global ranks that take part: those of the group, or the sender and the receiver."""
    ordinal: int
    """Number of earlier calls of this kind among these members in this group."""
    sent_bytes: int
    """Payload bytes that this rank sends."""
    arrival_ns: int
    """Time of the call by `time.monotonic_ns`, a clock that only the ranks of one host share."""
    received_bytes: int = 0
    """Bytes of a receive; 0 for other kinds."""

    @property
    def rendezvous_key(self) -> RendezvousKey:
        """Key of this call that is equal on all its members; a send and its receive have the same key."""
        kind = "send_recv" if self.kind in {"send", "recv"} else self.kind
        return kind, self.group, self.members, self.ordinal


def purpose_of(kind: str, payload_bytes: int, *, in_attention: bool) -> str:
    """Return the purpose of a call from its kind, the bytes passed to it, and whether attention makes it."""
    if in_attention:
        return "attention"
    if kind in {"all_reduce", "reduce"} and payload_bytes < SMALL_BYTES:
        return "data_and_loss"
    return PURPOSE_OF_KIND.get(kind, "other")


# With `_OF_FIRST` the payload is the operator's first argument, without it the second.
_ALL_GATHER, _ALL_GATHER_OF_FIRST = Collective("all_gather", 1), Collective("all_gather", 0)
_REDUCE_SCATTER, _REDUCE_SCATTER_OF_FIRST = Collective("reduce_scatter", 1), Collective("reduce_scatter", 0)
_ALL_REDUCE = Collective("all_reduce", 0)
_BROADCAST = Collective("broadcast", 0)
_ALL_TO_ALL_OF_FIRST = Collective("all_to_all", 0)
COLLECTIVES: Mapping[str, Collective] = {
    "c10d::alltoall_base_": Collective("all_to_all", 1, splits_arg=4),
    "c10d::alltoall_": Collective("all_to_all", 1, splits_arg=1),
    "c10d::_allgather_base_": _ALL_GATHER,
    "c10d::allgather_": _ALL_GATHER,
    "c10d::allgather_coalesced_": _ALL_GATHER,
    "c10d::allgather_into_tensor_coalesced_": _ALL_GATHER,
    "c10d::_reduce_scatter_base_": _REDUCE_SCATTER,
    "c10d::reduce_scatter_": _REDUCE_SCATTER,
    "c10d::reduce_scatter_tensor_coalesced_": _REDUCE_SCATTER,
    "c10d::allreduce_": _ALL_REDUCE,
    "c10d::allreduce_coalesced_": _ALL_REDUCE,
    "c10d::reduce_": Collective("reduce", 0, root_arg=3),
    "c10d::gather_": Collective("gather", 1, root_arg=3),
    "c10d::broadcast_": _BROADCAST,
    "c10d::scatter_": Collective("scatter", 1),
    "c10d::send": Collective("send", 0, peer_arg=2),
    "c10d::recv_": Collective("recv", 0, peer_arg=2),
    "c10d::recv_any_source_": Collective("recv_any_source", 0),  # the sender is not known at the call
    "c10d::barrier": Collective("barrier", 0),
    # Operators of DTensor and DeepSpeed's all-to-all: a dispatch mode does not see the c10d call inside them.
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
    "_c10d_functional::all_to_all_single": Collective("all_to_all", 0, splits_arg=2),
    "_dtensor::shard_dim_alltoall": _ALL_TO_ALL_OF_FIRST,
    "deepspeed::dim_zero_all_to_all": _ALL_TO_ALL_OF_FIRST,
}
"""Every operator whose bytes are counted, by its name in torch's dispatcher."""

WITHOUT_PAYLOAD = frozenset({
    "c10d::check_for_nan",
    "c10d::monitored_barrier_",  # gloo makes this barrier of sends and receives
    "_c10d_functional::wait_tensor",
    "_c10d_functional::_wrap_tensor_autograd",
    "_dtensor::mesh_get_process_group",
})  # fmt: skip
"""Communication operators that send no payload."""

COMMUNICATION = ("c10d::", "_c10d_functional::", "_dtensor::", "symm_mem::")
"""Namespaces of torch operators that may send.

`c10d_functional` and `_c10d_functional_autograd` are left out, because they call `_c10d_functional`.
"""


def collective_of(operator: str) -> Collective | None:
    """Return the entry of an operator in the table; None if the operator sends nothing.

    Raises:
        NotImplementedError: The operator may send but is in no table, so its bytes would be missing. In
            torch 2.13 these are point-to-point calls of compiled code and copies through symmetric memory.
    """
    collective = COLLECTIVES.get(operator)
    if collective is None and operator.startswith(COMMUNICATION) and operator not in WITHOUT_PAYLOAD:
        raise NotImplementedError(f"cannot count the bytes that {operator} sends; add it to COLLECTIVES")
    return collective
