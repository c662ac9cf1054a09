"""UPipe (arXiv:2602.21196): Ulysses in rounds, each of which computes whole sequences of a few heads.

Shapes: B batch, T tokens of a sequence, S of a shard, N query heads, K KV heads, H heads of one rank in one
round, D head size. A round takes H query heads of every rank with their KV heads. If a rank has fewer KV
heads than there are rounds, the same KV heads serve several rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.attention.kernels import Kernel, Packing, kernel_backward, kernel_forward
from bench.attention.packed import flatten_batch, packed_backward, packed_forward, unflatten_batch
from bench.strategies.strategy import Strategy
from bench.strategies.ulysses.attention import at_least_one_head
from bench.strategies.ulysses_chunked.rounds import Rounds


class UlyssesChunkedAttention(Strategy):
    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        rounds = Rounds(self.groups.ulysses, self.cell.number("chunks"), self.cell.flag("overlap"))
        k_BKSD, v_BKSD = (at_least_one_head(x, rounds.group.size()) for x in (k_BKSD, v_BKSD))
        attend = WholeSequenceAttention(self.kernel, causal, self.packing)
        out: Tensor = _UlyssesChunked.apply(q_BNSD, k_BKSD, v_BKSD, rounds, attend)  # type: ignore[no-untyped-call]
        return out


class _UlyssesChunked(torch.autograd.Function):
    """Attention in rounds that saves only local shards and LSEs; backward repeats the all-to-alls."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, rounds: Rounds, attend: WholeSequenceAttention
    ) -> Tensor:
        out, lses = torch.empty_like(q), []

        def compute(index: int, qkv: list[Tensor]) -> Sequence[Tensor]:  # noqa: ARG001
            out_BHTD, lse = attend.forward(*qkv)
            lses.append(lse)
            return [out_BHTD]

        rounds.run((q, k, v), (out,), compute)
        ctx.rounds, ctx.attend = rounds, attend
        ctx.save_for_backward(q, k, v, out, *lses)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, *lses = ctx.saved_tensors
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))

        attend: WholeSequenceAttention = ctx.attend

        def compute(index: int, heads: list[Tensor]) -> Sequence[Tensor]:
            dout_BHTD, q_BHTD, k_BHTD, v_BHTD, out_BHTD = heads
            return attend.backward(dout_BHTD, q_BHTD, k_BHTD, v_BHTD, out_BHTD, lses[index])

        ctx.rounds.run((dout, q, k, v, out), (dq, dk, dv), compute)
        return dq, dk, dv, None, None


@dataclass(frozen=True, slots=True)
class WholeSequenceAttention:
    """Attention over whole sequences, within documents if they are packed."""

    kernel: Kernel
    causal: bool
    packing: Packing | None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output, [B, H, T, D], and the LSE in the shape that `backward` takes."""
        if self.packing is None:
            return kernel_forward(self.kernel, q, k, v, causal=self.causal, scale=q.shape[-1] ** -0.5)
        qs, ks, vs = map(flatten_batch, (q, k, v))
        out_TND, lse = packed_forward(self.kernel, qs, ks, vs, self.packing)
        return unflatten_batch(out_TND, len(q)), lse

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, ...]:
        """Return dq, dk and dv."""
        if self.packing is None:
            scale = q.shape[-1] ** -0.5
            return kernel_backward(self.kernel, dout, q, k, v, out, lse, causal=self.causal, scale=scale)
        douts, qs, ks, vs, outs = map(flatten_batch, (dout, q, k, v, out))
        into = torch.empty_like(qs), torch.empty_like(ks), torch.empty_like(vs)
        packed_backward(self.kernel, into, douts, (qs, ks, vs), outs, lse, self.packing)
        return tuple(unflatten_batch(gradient, len(q)) for gradient in into)


STRATEGY = UlyssesChunkedAttention
