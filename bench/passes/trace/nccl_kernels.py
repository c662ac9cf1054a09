"""NCCL's kernels by what the profiler says of them, for steps in which the calls behind them are not known.

Kineto adds to a kernel the arguments of the call that launched it: `Collective name`, `In msg nelems`,
`dtype`. A batch of sends and receives has none of them, and before NCCL 2.19 kernels of any kind may be named
SendRecv. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping

from bench.cost.traffic import SMALL_BYTES
from bench.passes.calls import purpose_of
from bench.passes.trace.reader import Event

KINDS_BY_COLLECTIVE: Mapping[str, str] = {
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "allreduce": "all_reduce",
    "all_reduce": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "broadcast": "broadcast",
    "barrier": "barrier",
    # Parts of names above, so after them.
    "gather": "gather",
    "scatter": "scatter",
    "reduce": "reduce",
}
"""By a part of `Collective name`, which torch writes in several ways."""
KINDS_BY_KERNEL: Mapping[str, str] = {
    "AllGather": "all_gather",
    "AllReduce": "all_reduce",
    "ReduceScatter": "reduce_scatter",
    "Broadcast": "broadcast",
    "Reduce": "reduce",
    "SendRecv": "send_recv",
}
"""By a part of the kernel's own name; an all-to-all is sends and receives to NCCL."""
DTYPE_BYTES: Mapping[str, int] = {
    "BFloat16": 2, "Half": 2, "Float": 4, "Double": 8, "Long": 8, "Int": 4, "Byte": 1, "Bool": 1,
}  # fmt: skip


def kind_and_purpose(kernel: str, notes: Event, *, in_attention: bool) -> tuple[str, str]:
    """Kind and purpose of the call that launched this kernel, from inside attention or not."""
    kind = kind_of(kernel, notes)
    return kind, purpose_of(kind, _handed_bytes(notes), in_attention=in_attention)


def kind_of(kernel: str, notes: Event) -> str:
    """The call's kind, by what the profiler calls it, else by the kernel's name."""
    collective = str(notes.get("Collective name", "")).lower()
    by_call = (kind for part, kind in KINDS_BY_COLLECTIVE.items() if part in collective)
    by_kernel = (kind for part, kind in KINDS_BY_KERNEL.items() if part in kernel)
    return next(by_call, None) or next(by_kernel, "other")


def _handed_bytes(notes: Event) -> int:
    """Bytes of the input; a call of unknown size is no small one."""
    if "In msg nelems" not in notes:
        return SMALL_BYTES
    return int(notes["In msg nelems"]) * DTYPE_BYTES.get(str(notes.get("dtype")), 1)
