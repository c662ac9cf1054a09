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
        """Exchange shards of all heads for whole sequences of some, and write back what they come to.

        Of no round more is held than is needed: what is sent until it is received, what is received until it
        is in order.
        """
        arriving, returning = self._send(given, 0), None
        for number in range(self.chunks):
            assert arriving is not None
            whole = [in_sequences(part) for part in arriving.wait()]
            arriving = self._send(given, number + 1) if self.overlap else None
            computed = compute(number, whole)
            del whole
            if returning is not None:
                self._put(results, number - 1, returning)
            returning = exchange([in_shards(x, self.group.size()) for x in computed], self.group)
            del computed
            if not self.overlap:
                self._put(results, number, returning)
                arriving, returning = self._send(given, number + 1), None
        if returning is not None:
            self._put(results, self.chunks - 1, returning)

    def _send(self, given: Sequence[Tensor], number: int) -> Arriving | None:
        """The heads of a round; None after the last."""
        if number == self.chunks:
            return None
        return exchange([self._chunk(x, number) for x in given], self.group)

    def _put(self, results: Sequence[Tensor], number: int, returning: Arriving) -> None:
        for result, part in zip(results, returning.wait(), strict=True):
            self._chunk(result, number).copy_(part)

    def _chunk(self, x_BNSD: Tensor, number: int) -> Tensor:
        """[P, H, B, S, D]: of the heads that belong to each rank those of one round."""
        x_BPCHSD: Tensor = x_BNSD.unflatten(1, (self.group.size(), self.chunks, -1))
        return x_BPCHSD[:, :, number].permute(1, 2, 0, 3, 4)


@dataclass(slots=True)
class Arriving:
    """An all-to-all under way, of several tensors in one."""

    sent: Tensor | None
    """Kept alive until it has been sent."""
    received: Tensor | None
    heads: list[int]
    """How many each tensor has of `received`."""
    work: dist.Work

    def wait(self) -> tuple[Tensor, ...]:
        """What came from each rank, [P, H, B, S, D] by tensor; it can be taken once."""
        self.work.wait()
        assert self.received is not None
        parts: tuple[Tensor, ...] = self.received.split(self.heads, dim=1)
        self.sent = self.received = None
        return parts


def exchange(parts_PHBSD: Sequence[Tensor], group: dist.ProcessGroup) -> Arriving:
    """Start sending slice p of each tensor to rank p."""
    first, heads = parts_PHBSD[0], [part.shape[1] for part in parts_PHBSD]
    # Given and contiguous: that of `cat` would have strides of its own, which gloo does not heed.
    sent = first.new_empty(len(first), sum(heads), *first.shape[2:])
    torch.cat([*parts_PHBSD], dim=1, out=sent)
    received = torch.empty_like(sent)
    work = dist.all_to_all_single(received, sent, group=group, async_op=True)
    return Arriving(sent, received, heads, work)


def in_sequences(part_PHBSD: Tensor) -> Tensor:
    """[B, H, T, D]: the shards of all ranks one after another."""
    return part_PHBSD.permute(2, 1, 0, 3, 4).flatten(2, 3)


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
