"""One hop of a ring: send to the next rank, receive from the previous one, compute in between."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Arriving:
    """A tensor on its way; `sent` is kept alive until it has left."""

    sent: Tensor
    received: Tensor
    works: tuple[dist.Work, ...]

    def wait(self) -> Tensor:
        """The previous rank's tensor, once it is here and one's own has left."""
        for work in self.works:
            work.wait()
        return self.received


def rotate(tensor: Tensor, group: dist.ProcessGroup) -> Arriving:
    """Start passing `tensor` on; alone in the ring it is its own neighbour and stays."""
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
