"""Rounds, each of which gathers some heads by all-to-all, computes them and sends the results back.

Shapes: B batch, P ranks of the sequence group, T tokens of a sequence, S = T/P of a shard, N heads, H of one
rank in one round, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

Compute = Callable[[int, list[Tensor]], Sequence[Tensor]]
"""Function from a round's index and its whole sequences, [B, H, T, D] each, to results of such shapes."""


@dataclass(frozen=True, slots=True)
class Rounds:
    """Sequence of rounds over the heads of all tensors.

    If a rank computes fewer heads of a tensor than there are rounds, as may be for K and V, the same heads
    serve several rounds. They arrive with the first of these rounds and stay until the next heads arrive.
    Their results, such as gradients, are summed over these rounds and sent back with the last of them.
    """

    group: dist.ProcessGroup
    chunks: int
    """Number of rounds."""
    overlap: bool
    """Whether the next heads and the previous results are sent while a round is computed."""

    def run(self, inputs: Sequence[Tensor], results: Sequence[Tensor], compute: Compute) -> None:
        """Compute all rounds and write the shards of their results.

        Args:
            inputs: Local shards of all heads, [B, N, S, D] each.
            results: Tensors [B, N, S, D] to which the local shards of the results are written.
            compute: Function that computes one round.
        """
        # The first round sends the heads of all inputs, the last one those of all results.
        largest = ([self._heads(x, 0) for x in tensors] for tensors in (inputs, results))
        input_channel, result_channel = (AllToAllChannel(self.group, message) for message in largest)
        sequences: dict[int, Tensor] = {}
        sums: dict[int, Tensor] = {}
        self._send_heads(input_channel, inputs, 0)
        for index in range(self.chunks):
            # Replaced one by one, so that two rounds' sequences are never in memory together.
            sequences |= zip(
                self._first_used(inputs, index), map(in_sequences, input_channel.wait()), strict=True
            )
            if self.overlap:
                self._send_heads(input_channel, inputs, index + 1)
            computed = compute(index, [sequences[number] for number in range(len(inputs))])
            self._add_results(sums, results, computed)
            del computed
            if self.overlap and index > 0:
                self._write_results(result_channel, results, index - 1)
            result_channel.start(self._pop_finished(sums, results, index))
            if not self.overlap:
                self._write_results(result_channel, results, index)
                self._send_heads(input_channel, inputs, index + 1)
        if self.overlap:
            self._write_results(result_channel, results, self.chunks - 1)

    def _send_heads(self, channel: AllToAllChannel, inputs: Sequence[Tensor], index: int) -> None:
        if index < self.chunks:
            channel.start([self._heads(inputs[number], index) for number in self._first_used(inputs, index)])

    def _write_results(self, channel: AllToAllChannel, results: Sequence[Tensor], index: int) -> None:
        for number, part in zip(self._last_used(results, index), channel.wait(), strict=True):
            self._heads(results[number], index).copy_(part)

    def _add_results(
        self, sums: dict[int, Tensor], results: Sequence[Tensor], computed: Sequence[Tensor]
    ) -> None:
        """Add the results of a round to `sums`, which sum over the rounds that take the same heads.

        A sum of several rounds is in float32 or wider, and is rounded once, when it is copied into the
        channel.
        """
        for number, (result, part) in enumerate(zip(results, computed, strict=True)):
            if number in sums:
                sums[number] += part
            elif self._rounds_of(result) == 1:
                sums[number] = part
            else:
                sums[number] = part.to(torch.promote_types(part.dtype, torch.float32))

    def _pop_finished(self, sums: dict[int, Tensor], results: Sequence[Tensor], index: int) -> list[Tensor]:
        """Remove the sums that no later round changes, and return their shards, [P, H, B, S, D] each."""
        return [in_shards(sums.pop(number), self.group.size()) for number in self._last_used(results, index)]

    def _rounds_of(self, x_BNSD: Tensor) -> int:
        """Return the number of consecutive rounds that take the same heads of a tensor."""
        return max(1, self.chunks * self.group.size() // x_BNSD.shape[1])

    def _first_used(self, tensors: Sequence[Tensor], index: int) -> list[int]:
        """Return the indices of the tensors whose heads of this round no earlier round has taken."""
        return [number for number, x in enumerate(tensors) if index % self._rounds_of(x) == 0]

    def _last_used(self, tensors: Sequence[Tensor], index: int) -> list[int]:
        """Return the indices of the tensors whose heads of this round no later round takes."""
        return [number for number, x in enumerate(tensors) if (index + 1) % self._rounds_of(x) == 0]

    def _heads(self, x_BNSD: Tensor, index: int) -> Tensor:
        """Return a view of every rank's heads of one round, [P, H, B, S, D]."""
        rounds = self._rounds_of(x_BNSD)
        x_BPCHSD: Tensor = x_BNSD.unflatten(1, (self.group.size(), self.chunks // rounds, -1))
        return x_BPCHSD[:, :, index // rounds].permute(1, 2, 0, 3, 4)


class AllToAllChannel:
    """Buffers for all-to-alls of several tensors in one message, one message at a time.

    The buffers have the size of the largest message and serve all rounds. New buffers for every round would
    cost more memory, because old ones stay allocated until the communication library releases them.
    """

    def __init__(self, group: dist.ProcessGroup, largest: Sequence[Tensor]) -> None:
        self.group = group
        self.sent = largest[0].new_empty(sum(part.numel() for part in largest))
        self.received = torch.empty_like(self.sent)
        self.arriving: tuple[Tensor, ...] = ()
        self.work: dist.Work | None = None

    def start(self, parts_PHBSD: Sequence[Tensor]) -> None:
        """Start to send slice p of every tensor to rank p, cast to the buffers' dtype.

        It overwrites the tensors that the previous `wait` returned.
        """
        heads = [part.shape[1] for part in parts_PHBSD]
        ranks, _, *shard = parts_PHBSD[0].shape
        size = sum(part.numel() for part in parts_PHBSD)
        sent, received = (x[:size].view(ranks, sum(heads), *shard) for x in (self.sent, self.received))
        torch.cat([*parts_PHBSD], dim=1, out=sent)
        self.arriving = received.split(heads, dim=1)
        self.work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)

    def wait(self) -> tuple[Tensor, ...]:
        """Return the received tensors, [P, H, B, S, D] each, which are valid until the next `start`."""
        assert self.work is not None
        self.work.wait()
        return self.arriving


def in_sequences(part_PHBSD: Tensor) -> Tensor:
    """Return the shards of all ranks as whole sequences, [B, H, T, D], always as a copy."""
    return part_PHBSD.permute(2, 1, 0, 3, 4).clone(memory_format=torch.contiguous_format).flatten(2, 3)


def in_shards(x_BHTD: Tensor, ranks: int) -> Tensor:
    """Return a view of whole sequences as the shards of all ranks, [P, H, B, S, D]."""
    x_BHPSD: Tensor = x_BHTD.unflatten(2, (ranks, -1))
    return x_BHPSD.permute(2, 1, 0, 3, 4)
