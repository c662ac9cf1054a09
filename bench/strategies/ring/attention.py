"""Ring Attention (arXiv:2310.01889), in which ranks keep their queries and pass keys and values round a ring.

Shapes: B batch, P ranks of the ring, S tokens of a shard, N query heads, K KV heads, D head size. K and V
are sent as one tensor, [2, B, K, S, D].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.attention.documents import Documents, document_tiles
from bench.attention.kernels import Kernel, kernel_backward, kernel_forward
from bench.attention.layouts import ALL, EVERYTHING, LAYOUTS, Layout, Tile
from bench.attention.merge import Partial
from bench.attention.rotation import rotate
from bench.strategies.strategy import Strategy


class RingAttention(Strategy):
    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        return ring_attention(q_BNSD, k_BKSD, v_BKSD, self.ring(causal=causal))

    def log_sum_exp(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        return ring_forward(q_BNSD, torch.stack([k_BKSD, v_BKSD]), self.ring(causal=causal)).lse

    def ring(self, *, causal: bool) -> RingContext:
        return RingContext(self.groups.ring, self.kernel, LAYOUTS[self.cell.layout], causal, self.documents)


@dataclass(frozen=True, slots=True)
class RingContext:
    """Process group, kernel, layout, mask and documents of a call of ring attention."""

    group: dist.ProcessGroup
    kernel: Kernel
    layout: Layout
    causal: bool
    documents: Documents | None = None
    """Documents of the batch if attention must stay within them; the mask is then causal."""

    def sources(self) -> list[int]:
        """Return, for every ring step, the rank whose keys are here: this rank, then the previous ones."""
        size, rank = self.group.size(), self.group.rank()
        return [(rank - ring_step) % size for ring_step in range(size)]

    def tiles(self, shard_len: int, source: int) -> Sequence[Tile]:
        """Return the tiles that the mask leaves of this rank's queries and the source's keys."""
        rank, size = self.group.rank(), self.group.size()
        if self.documents is not None:
            return document_tiles(self.documents, self.layout, size, rank, source)
        tile = self.layout.causal_tile(shard_len, rank, source) if self.causal else EVERYTHING
        return () if tile is None else (tile,)


def ring_attention(q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, ring: RingContext) -> Tensor:
    """Return attention to the keys of all ranks, [B, N, S, D], differentiable."""
    kv_2BKSD = torch.stack([k_BKSD, v_BKSD])
    out: Tensor = _RingAttention.apply(q_BNSD, kv_2BKSD, ring)  # type: ignore[no-untyped-call]
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, ring: RingContext) -> Tensor:
        partial = ring_forward(q, kv, ring)
        out = partial.out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, partial.lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, None]:
        q, kv, out, lse = ctx.saved_tensors
        dq, dkv = ring_backward(dout, q, kv, out, lse, ctx.ring)
        return dq, dkv, None


def ring_forward(q: Tensor, kv: Tensor, ring: RingContext) -> Partial:
    """Return output and LSE over the keys of all ranks, computing a block while the next one arrives."""
    scale = q.shape[-1] ** -0.5
    partial = None if ring.documents is None else Partial.empty(q)
    for source in ring.sources():
        is_last = source == ring.sources()[-1]
        arriving = None if is_last else rotate(kv, ring.group)
        for tile in ring.tiles(q.shape[2], source):
            block = kernel_forward(
                ring.kernel,
                q[tile.sequences, :, tile.queries],
                *(x[tile.sequences, :, tile.keys] for x in kv),
                causal=tile.causal,
                scale=scale,
            )
            if partial is None:
                partial = Partial.first(*block)
            else:
                partial.select_sequences(tile.sequences).merge(tile.queries, *block)
        kv = kv if arriving is None else arriving.wait()[0]
    assert partial is not None
    return partial


def ring_backward(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, ring: RingContext
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and of this rank's kv, in their dtypes.

    A shard of kv and the sum of its gradients both go round the ring. The sum arrives while a rank computes
    its share of it, and is sent on after the share is added. One hop after the last ring step brings the sum
    to the rank that owns the shard. The owner's share never leaves it, so a sum makes P-1 hops instead of P.
    """
    scale, wide_dtype = q.shape[-1] ** -0.5, lse.dtype
    dq = torch.zeros_like(q, dtype=wide_dtype)
    local_dkv = torch.zeros(kv.shape, dtype=wide_dtype, device=kv.device)
    returning = None
    for source in ring.sources():
        is_local, is_last = source == ring.group.rank(), source == ring.sources()[-1]
        arriving = None if is_last else rotate(kv, ring.group)
        shares = []
        for tile in ring.tiles(q.shape[2], source):
            rows, keys = (tile.sequences, ALL, tile.queries), (tile.sequences, ALL, tile.keys)
            share_dq, *share = kernel_backward(
                ring.kernel,
                *(x[rows] for x in (dout, q)),
                *(x[keys] for x in kv),
                *(x[rows] for x in (out, lse)),
                causal=tile.causal,
                scale=scale,
            )
            dq[rows] += share_dq
            shares.append((keys, share))
        if is_local:
            dkv = local_dkv
        else:
            dkv = torch.zeros_like(local_dkv) if returning is None else returning.wait()[0]
        for keys, (share_dk, share_dv) in shares:
            dkv[0][keys] += share_dk
            dkv[1][keys] += share_dv
        returning = None if is_local else rotate(dkv, ring.group)
        kv = kv if arriving is None else arriving.wait()[0]
    if returning is not None:
        local_dkv += returning.wait()[0]
    return dq.to(q.dtype), local_dkv.to(q.dtype)


STRATEGY = RingAttention
