"""Ulysses (arXiv:2309.14509, section 3), which exchanges sequence shards for heads and back by all-to-all.

Shapes: B batch, P ranks of the sequence group, T tokens of a sequence, S = T/P of a shard, N query heads,
M = N/P of one rank, K KV heads, L of one rank (at least one), D head size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.strategies.strategy import Strategy


class UlyssesAttention(Strategy):
    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        q_BMTD, k_BLTD, v_BLTD = gather_seq_scatter_heads(q_BNSD, k_BKSD, v_BKSD, self.groups.ulysses)
        out_BMTD = self.attend_whole(q_BMTD, k_BLTD, v_BLTD, causal=causal)
        return gather_heads_scatter_seq(out_BMTD, self.groups.ulysses)


def gather_seq_scatter_heads(
    q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Return whole sequences of this rank's heads, q [B, M, T, D], k and v [B, L, T, D], by one all-to-all.

    If there are fewer KV heads than ranks, a KV head is sent to all ranks whose query heads need it.
    """
    ranks = group.size()
    if ranks == 1:
        return q_BNSD, k_BKSD, v_BKSD
    qkv = (q_BNSD, k_BKSD, v_BKSD)
    shares: list[Tensor] = [at_least_one_head(x, ranks).unflatten(1, (ranks, -1)) for x in qkv]  # [B, P, ...]
    sent_PBHSD = torch.cat([share.transpose(0, 1) for share in shares], dim=2)
    received_PBHSD = all_to_all(sent_PBHSD, group)
    whole_BHTD = received_PBHSD.permute(1, 2, 0, 3, 4).flatten(2, 3)
    q_BMTD, k_BLTD, v_BLTD = whole_BHTD.split([share.shape[2] for share in shares], dim=1)
    return q_BMTD, k_BLTD, v_BLTD


def gather_heads_scatter_seq(out_BMTD: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's shard of all heads, [B, N, S, D], by one all-to-all."""
    if group.size() == 1:
        return out_BMTD
    sent_PBMSD = out_BMTD.unflatten(2, (group.size(), -1)).permute(2, 0, 1, 3, 4)
    return all_to_all(sent_PBMSD, group).transpose(0, 1).flatten(1, 2)


def all_to_all(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send slice p of the first dimension to rank p, and return the received slices in the order of ranks."""
    received: Tensor = _AllToAll.apply(parts, group)  # type: ignore[no-untyped-call]
    return received


class _AllToAll(torch.autograd.Function):
    """Differentiable all-to-all; backward is the same all-to-all of the gradients."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all_single(parts, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _all_to_all_single(grad, ctx.group), None


def _all_to_all_single(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    # Both tensors must be contiguous: `empty_like` of a permuted view keeps its strides, and gloo then fills
    # the buffer in the wrong order without an error.
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received


def at_least_one_head(x_BHSD: Tensor, ranks: int) -> Tensor:
    """Return a tensor with at least one head per rank, for which heads are repeated if there are too few."""
    heads = x_BHSD.shape[1]
    return x_BHSD if heads >= ranks else x_BHSD.repeat_interleave(ranks // heads, dim=1)


STRATEGY = UlyssesAttention
