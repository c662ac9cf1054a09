"""Tensors that travel between ranks of a group while these compute: to any rank, or one hop round a ring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class HandOver:
    """Tensors on their way to one rank, and others that come from another."""

    sent: tuple[Tensor, ...]
    """This rank's own, kept alive until they have been sent."""
    received: tuple[Tensor, ...]
    works: tuple[dist.Work, ...]

    def wait(self) -> tuple[Tensor, ...]:
        """What was received, once it is here and this rank's has been sent."""
        for work in self.works:
            work.wait()
        return self.received


def hand_over(
    sent: Sequence[Tensor], to: int, like: Sequence[Tensor], source: int, group: dist.ProcessGroup
) -> HandOver:
    """Start sending to one rank of the group, and receiving tensors `like` these from another; or neither."""
    leaving = tuple(tensor.contiguous() for tensor in sent)
    received = tuple(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in like)
    receiver, sender = (dist.get_global_rank(group, rank) for rank in (to, source))
    calls = [
        *(dist.P2POp(dist.isend, tensor, receiver, group=group) for tensor in leaving),
        *(dist.P2POp(dist.irecv, tensor, sender, group=group) for tensor in received),
    ]
    return HandOver(leaving, received, tuple(dist.batch_isend_irecv(calls)) if calls else ())


def rotate(tensor: Tensor, group: dist.ProcessGroup) -> HandOver:
    """Start sending `tensor` to the next rank, receiving the last one's; in a ring of one it stays."""
    if group.size() == 1:
        return HandOver((), (tensor,), ())
    following, previous = ((group.rank() + step) % group.size() for step in (1, -1))
    return hand_over((tensor,), following, (tensor,), previous, group)
