"""Ulysses in rounds of a few heads, UPipe (arXiv:2602.21196): whole sequences of one round at a time.

Shapes: B batch, P ranks of the sequence group, T sequence, S = T/P its shard, N query heads, K KV heads, H
heads of one rank in one round, D head size. A round takes H query heads of each rank with their KV heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.attention.kernels import Kernel, Packing, kernel_backward, kernel_forward
from bench.attention.packed import end_to_end, in_batches, packed_backward, packed_forward
from bench.strategies.strategy import Strategy
from bench.strategies.ulysses.attention import at_least_one_head

Compute = Callable[[int, list[Tensor]], Sequence[Tensor]]
"""From a round's number and its whole sequences, [B, H, T, D] each, to its results of such shapes."""


class UlyssesChunkedAttention(Strategy):
    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        rounds = Rounds(self.groups.ulysses, self.cell.number("chunks"), self.cell.flag("overlap"))
        k_BKSD, v_BKSD = (at_least_one_head(x, rounds.group.size()) for x in (k_BKSD, v_BKSD))
        whole = Whole(self.kernel, causal, self.packing)
        out: Tensor = _UlyssesChunked.apply(q_BNSD, k_BKSD, v_BKSD, rounds, whole)  # type: ignore[no-untyped-call]
        return out


class _UlyssesChunked(torch.autograd.Function):
    """Kept are one's own shards and each round's LSE: backward exchanges all heads again, round by round."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, rounds: Rounds, whole: Whole) -> Tensor:
        out, lses = torch.empty_like(q), []

        def compute(number: int, qkv: list[Tensor]) -> Sequence[Tensor]:  # noqa: ARG001
            out_BHTD, lse = whole.forward(*qkv)
            lses.append(lse)
            return [out_BHTD]

        rounds.run((q, k, v), (out,), compute)
        ctx.rounds, ctx.whole = rounds, whole
        ctx.save_for_backward(q, k, v, out, *lses)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, *lses = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))

        whole: Whole = ctx.whole

        def compute(number: int, heads: list[Tensor]) -> Sequence[Tensor]:
            dout_BHTD, q_BHTD, k_BHTD, v_BHTD, out_BHTD = heads
            return whole.backward(dout_BHTD, q_BHTD, k_BHTD, v_BHTD, out_BHTD, lses[number])

        ctx.rounds.run((dout, q, k, v, out), (dq, dk, dv), compute)
        return dq, dk, dv, None, None


@dataclass(frozen=True, slots=True)
class Rounds:
    """How heads are exchanged: chunk by chunk, with the next under way while one is computed, or in turn."""

    group: dist.ProcessGroup
    chunks: int
    overlap: bool

    def run(self, given: Sequence[Tensor], results: Sequence[Tensor], compute: Compute) -> None:
        """Exchange shards of all heads for whole sequences of some, and what these come to for `results`."""
        there, back = self._channel(given), self._channel(results)
        self._send(there, given, 0)
        for number in range(self.chunks):
            whole = [in_sequences(part) for part in there.wait()]
            if self.overlap:
                self._send(there, given, number + 1)
            computed = compute(number, whole)
            if self.overlap and number > 0:
                self._take(back, results, number - 1)
            back.start([in_shards(x, self.group.size()) for x in computed])
            del whole, computed  # before the next heads are put in order
            if not self.overlap:
                self._take(back, results, number)
                self._send(there, given, number + 1)
        if self.overlap:
            self._take(back, results, self.chunks - 1)

    def _channel(self, tensors: Sequence[Tensor]) -> Channel:
        """For these tensors' heads of one round."""
        return Channel(self.group, [self._heads(x, 0) for x in tensors])

    def _send(self, there: Channel, given: Sequence[Tensor], number: int) -> None:
        if number < self.chunks:
            there.start([self._heads(x, number) for x in given])

    def _take(self, back: Channel, results: Sequence[Tensor], number: int) -> None:
        for result, part in zip(results, back.wait(), strict=True):
            self._heads(result, number).copy_(part)

    def _heads(self, x_BNSD: Tensor, number: int) -> Tensor:
        """[P, H, B, S, D]: of the heads that belong to each rank those of one round."""
        x_BPCHSD: Tensor = x_BNSD.unflatten(1, (self.group.size(), self.chunks, -1))
        return x_BPCHSD[:, :, number].permute(1, 2, 0, 3, 4)


class Channel:
    """One all-to-all at a time, of several tensors in one.

    Its buffers serve all rounds: freed, they would be held until the library lets go of them.
    """

    def __init__(self, group: dist.ProcessGroup, shapes_of: Sequence[Tensor]) -> None:
        self.group = group
        self.heads = [each.shape[1] for each in shapes_of]
        ranks, _, *shard = shapes_of[0].shape
        self.sent = shapes_of[0].new_empty(ranks, sum(self.heads), *shard)
        self.received = torch.empty_like(self.sent)
        self.work: dist.Work | None = None

    def start(self, parts_PHBSD: Sequence[Tensor]) -> None:
        """Begin to send slice p of each tensor to rank p; what came before has been taken."""
        torch.cat([*parts_PHBSD], dim=1, out=self.sent)
        self.work = dist.all_to_all_single(self.received, self.sent, group=self.group, async_op=True)

    def wait(self) -> tuple[Tensor, ...]:
        """What came from each rank, [P, H, B, S, D] by tensor, until the next start."""
        assert self.work is not None
        self.work.wait()
        parts: tuple[Tensor, ...] = self.received.split(self.heads, dim=1)
        return parts


def in_sequences(part_PHBSD: Tensor) -> Tensor:
    """[B, H, T, D]: the shards of all ranks one after another; a copy even of one rank's."""
    return part_PHBSD.permute(2, 1, 0, 3, 4).clone(memory_format=torch.contiguous_format).flatten(2, 3)


def in_shards(x_BHTD: Tensor, ranks: int) -> Tensor:
    """[P, H, B, S, D]: the shard of each rank."""
    x_BHPSD: Tensor = x_BHTD.unflatten(2, (ranks, -1))
    return x_BHPSD.permute(2, 1, 0, 3, 4)


@dataclass(frozen=True, slots=True)
class Whole:
    """Attention over whole sequences, within their documents where they are packed."""

    kernel: Kernel
    causal: bool
    packing: Packing | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Output [B, H, T, D], and the LSE for `backward`."""
        if self.packing is None:
            return kernel_forward(self.kernel, q, k, v, causal=self.causal, scale=q.shape[-1] ** -0.5)
        qs, ks, vs = map(end_to_end, (q, k, v))
        out_TND, lse = packed_forward(self.kernel, qs, ks, vs, self.packing)
        return in_batches(out_TND, len(q)), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        """dq, dk and dv."""
        if self.packing is None:
            scale = q.shape[-1] ** -0.5
            return kernel_backward(self.kernel, dout, q, k, v, out, lse, causal=self.causal, scale=scale)
        douts, qs, ks, vs, outs = map(end_to_end, (dout, q, k, v, out))
        into = torch.empty_like(qs), torch.empty_like(ks), torch.empty_like(vs)
        packed_backward(self.kernel, into, douts, (qs, ks, vs), outs, lse, self.packing)
        return tuple(in_batches(gradient, len(q)) for gradient in into)


STRATEGY = UlyssesChunkedAttention
