"""What carries a round's heads from shards to whole sequences, or back.

Shapes: B batch, P ranks of the sequence group, T sequence, S = T/P its shard, H heads of one rank in one
round, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class Channel:
    """One all-to-all at a time, of several tensors in one.

    Its buffers are as large as the fullest message and serve all rounds: freed, they would be held until the
    library lets go of them.
    """

    def __init__(self, group: dist.ProcessGroup, fullest: Sequence[Tensor]) -> None:
        self.group = group
        self.sent = fullest[0].new_empty(sum(part.numel() for part in fullest))
        self.received = torch.empty_like(self.sent)
        self.arriving: tuple[Tensor, ...] = ()
        self.work: dist.Work | None = None

    def start(self, parts_PHBSD: Sequence[Tensor]) -> None:
        """Begin to send slice p of each tensor to rank p, in the buffers' dtype; the last was taken."""
        heads = [part.shape[1] for part in parts_PHBSD]
        ranks, _, *shard = parts_PHBSD[0].shape
        size = sum(part.numel() for part in parts_PHBSD)
        sent, received = (x[:size].view(ranks, sum(heads), *shard) for x in (self.sent, self.received))
        torch.cat([*parts_PHBSD], dim=1, out=sent)
        self.arriving = received.split(heads, dim=1)
        self.work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)

    def wait(self) -> tuple[Tensor, ...]:
        """What came from each rank, [P, H, B, S, D] by tensor, until the next start."""
        assert self.work is not None
        self.work.wait()
        return self.arriving


def in_sequences(part_PHBSD: Tensor) -> Tensor:
    """[B, H, T, D]: the shards of all ranks one after another; a copy even of one rank's."""
    return part_PHBSD.permute(2, 1, 0, 3, 4).clone(memory_format=torch.contiguous_format).flatten(2, 3)


def in_shards(x_BHTD: Tensor, ranks: int) -> Tensor:
    """[P, H, B, S, D]: the shard of each rank."""
    x_BHPSD: Tensor = x_BHTD.unflatten(2, (ranks, -1))
    return x_BHPSD.permute(2, 1, 0, 3, 4)
