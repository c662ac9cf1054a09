"""One hop of a ring: send to the next rank, receive from the previous one, compute in between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arriving:
    """A tensor that is being received."""

    sent: Tensor
    """This rank's own, kept alive until it has been sent."""
    received: Tensor
    works: tuple[dist.Work, ...]

    def wait(self) -> Tensor:
        """The previous rank's tensor, once it is here and this rank's has been sent."""
        for work in self.works:
            work.wait()
        return self.received


def rotate(tensor: Tensor, group: dist.ProcessGroup) -> Arriving:
    """Start sending `tensor` to the next rank; in a ring of one it stays."""
    if group.size() == 1:
        return Arriving(tensor, tensor, ())
    sent = tensor.contiguous()
    received = torch.empty_like(sent)
    neighbours = [(group.rank() + step) % group.size() for step in (1, -1)]
    following, previous = (dist.get_global_rank(group, rank) for rank in neighbours)
    hops = [
        dist.P2POp(dist.isend, sent, following, group=group),
        dist.P2POp(dist.irecv, received, previous, group=group),
    ]
    return Arriving(sent, received, tuple(dist.batch_isend_irecv(hops)))
