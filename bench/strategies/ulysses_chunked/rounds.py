"""In which order heads are exchanged and computed, what stays from one round to the next, what carries them.

Shapes: B batch, P ranks of the sequence group, T sequence, S = T/P its shard, N heads, H of one rank in one
round, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Compute = Callable[[int, list[Tensor]], Sequence[Tensor]]
"""From a round's number and its whole sequences, [B, H, T, D] each, to new results of such shapes."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Chunk by chunk, with the next heads under way while some are computed, or in turn.

    Of tensors with fewer heads than rounds, K and V, the same heads serve several rounds: they come with the
    first and stay until the next ones come. What is made of them in each is added up, and goes home with the
    last.
    """

    group: dist.ProcessGroup
    chunks: int
    overlap: bool

    def run(self, given: Sequence[Tensor], results: Sequence[Tensor], compute: Compute) -> None:
        """Exchange shards of all heads for whole sequences of some, and what these come to for `results`."""
        fullest = ([self._heads(x, 0) for x in tensors] for tensors in (given, results))
        there, back = (Channel(self.group, message) for message in fullest)
        held: dict[int, Tensor] = {}
        sums: dict[int, Tensor] = {}
        self._send(there, given, 0)
        for number in range(self.chunks):
            # One by one, each in place of the last: two rounds' whole sequences are never there at once.
            held |= zip(self._first_used(given, number), map(in_sequences, there.wait()), strict=True)
            if self.overlap:
                self._send(there, given, number + 1)
            computed = compute(number, [held[place] for place in range(len(given))])
            self._add(sums, results, computed)
            del computed
            if self.overlap and number > 0:
                self._take(back, results, number - 1)
            back.start(self._finished(sums, results, number))
            if not self.overlap:
                self._take(back, results, number)
                self._send(there, given, number + 1)
        if self.overlap:
            self._take(back, results, self.chunks - 1)

    def _send(self, there: Channel, given: Sequence[Tensor], number: int) -> None:
        if number < self.chunks:
            there.start([self._heads(given[place], number) for place in self._first_used(given, number)])

    def _take(self, back: Channel, results: Sequence[Tensor], number: int) -> None:
        for place, part in zip(self._last_used(results, number), back.wait(), strict=True):
            self._heads(results[place], number).copy_(part)

    def _add(self, sums: dict[int, Tensor], results: Sequence[Tensor], computed: Sequence[Tensor]) -> None:
        """One round's results as they are; of several in float32 at least: a channel rounds them once."""
        for place, (result, part) in enumerate(zip(results, computed, strict=True)):
            if place in sums:
                sums[place] += part
            elif self._rounds_of(result) == 1:
                sums[place] = part
            else:
                sums[place] = part.to(torch.promote_types(part.dtype, torch.float32))

    def _finished(self, sums: dict[int, Tensor], results: Sequence[Tensor], number: int) -> list[Tensor]:
        """Shards of what no later round adds to, [P, H, B, S, D]."""
        return [in_shards(sums.pop(place), self.group.size()) for place in self._last_used(results, number)]

    def _rounds_of(self, x_BNSD: Tensor) -> int:
        """How many rounds, one after another, take the same heads of this tensor."""
        return max(1, self.chunks * self.group.size() // x_BNSD.shape[1])

    def _first_used(self, tensors: Sequence[Tensor], number: int) -> list[int]:
        """Which tensors' heads of this round no round before has taken."""
        return [place for place, x in enumerate(tensors) if number % self._rounds_of(x) == 0]

    def _last_used(self, tensors: Sequence[Tensor], number: int) -> list[int]:
        """Which tensors' heads of this round no later one takes."""
        return [place for place, x in enumerate(tensors) if (number + 1) % self._rounds_of(x) == 0]

    def _heads(self, x_BNSD: Tensor, number: int) -> Tensor:
        """[P, H, B, S, D]: of the heads that belong to each rank those of one round."""
        rounds = self._rounds_of(x_BNSD)
        x_BPCHSD: Tensor = x_BNSD.unflatten(1, (self.group.size(), self.chunks // rounds, -1))
        return x_BPCHSD[:, :, number // rounds].permute(1, 2, 0, 3, 4)


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
