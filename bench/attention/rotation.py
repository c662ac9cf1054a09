"""Asynchronous sends and receives between two ranks of a group, or between neighbours in a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PendingSendRecv:
    """Pending sends to one rank and receives from another."""

    sent_tensors: tuple[Tensor, ...]
    """Tensors of this rank, referenced until they have been sent."""
    received: tuple[Tensor, ...]
    """Buffers that are valid after `wait`."""
    works: tuple[dist.Work, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """Wait for all sends and receives, and return the received tensors."""
        for work in self.works:
            work.wait()
        return self.received


def start_send_recv(
    sent: Sequence[Tensor], to: int, like: Sequence[Tensor], source: int, group: dist.ProcessGroup
) -> PendingSendRecv:
    """Start sending tensors to one rank of the group and receiving tensors from another.

    Args:
        sent: Tensors to send; may be empty.
        to: Rank in `group` that receives `sent`.
        like: Tensors with the shapes, dtypes and devices of those to receive; may be empty.
        source: Rank in `group` that sends the tensors to receive.
        group: Process group.

    Returns:
        The pending communication. Its `wait` returns the received tensors.
    """
    outgoing = tuple(tensor.contiguous() for tensor in sent)
    received = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in like)
    receiver, sender = (dist.get_global_rank(group, rank) for rank in (to, source))
    calls = [
        *(dist.P2POp(dist.isend, tensor, receiver, group=group) for tensor in outgoing),
        *(dist.P2POp(dist.irecv, tensor, sender, group=group) for tensor in received),
    ]
    return PendingSendRecv(outgoing, received, tuple(dist.batch_isend_irecv(calls)) if calls else ())


def rotate(tensor: Tensor, group: dist.ProcessGroup) -> PendingSendRecv:
    """Start sending `tensor` to the next rank of the ring and receiving one like it from the previous rank.

    In a ring of one rank nothing is sent, and `wait` returns `tensor` itself.
    """
    if group.size() == 1:
        return PendingSendRecv((), (tensor,), ())
    following, previous = ((group.rank() + step) % group.size() for step in (1, -1))
    return start_send_recv((tensor,), following, (tensor,), previous, group)
