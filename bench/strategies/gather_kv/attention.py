"""Gathered keys (arXiv:2407.21783, section 3.3.2): every rank gathers all K and V and keeps its queries.

Shapes: B batch, P ranks that share a sequence, S tokens of a shard, N query heads, K KV heads, D head size. K
and V are gathered as one tensor, [P, 2, B, K, S, D].
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.attention.kernels import kernel_backward, kernel_forward
from bench.attention.layouts import ALL, Tile
from bench.attention.merge import Partial
from bench.strategies.ring.attention import Ring, RingAttention


class GatherKVAttention(RingAttention):
    """As a ring whose keys arrive all at once: of the same shards, with the same tiles of the mask."""

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        ring = self.ring(causal=causal)
        out: Tensor = _GatherKV.apply(q_BNSD, k_BKSD, v_BKSD, ring)  # type: ignore[no-untyped-call]
        return out

    def log_sum_exp(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        return gathered_forward(q_BNSD, k_BKSD, v_BKSD, self.ring(causal=causal))[0].lse


class _GatherKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> Tensor:
        partial, kv = gathered_forward(q, k, v, ring)
        out = partial.out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, partial.lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, kv, out, lse = ctx.saved_tensors
        return *gathered_backward(dout, q, kv, out, lse, ctx.ring), None


def gathered_forward(q: Tensor, k: Tensor, v: Tensor, ring: Ring) -> tuple[Partial, Tensor]:
    """Output and LSE over all ranks' keys, and these with their values, [P, 2, B, K, S, D].

    This rank attends to its own while the others' arrive.
    """
    rank, ranks = ring.group.rank(), ring.group.size()
    kv = k.new_empty(ranks, 2, *k.shape)
    # In place, so that one's own are copied once; they may be read meanwhile, as they stay what they are.
    own = torch.stack([k, v], out=kv[rank])
    arriving = dist.all_gather_into_tensor(kv.flatten(0, 1), own, group=ring.group, async_op=True)
    partial = None if ring.documents is None else Partial.nothing(q)
    for keys in seen_keys(ring, q.shape[2], range(rank, rank + 1)):
        partial = _attend(partial, q, kv, keys, ring)
    arriving.wait()
    for others in (range(rank), range(rank + 1, ranks)):
        for keys in seen_keys(ring, q.shape[2], others):
            partial = _attend(partial, q, kv, keys, ring)
    assert partial is not None
    return partial, kv


def gathered_backward(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, ring: Ring
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q and of this rank's own k and v: of its keys, those of all ranks are added up, wide."""
    rank, ranks, wide = ring.group.rank(), ring.group.size(), lse.dtype
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    dkv = torch.zeros(kv.shape, dtype=wide, device=kv.device)
    for sources in (range(rank, rank + 1), range(rank), range(rank + 1, ranks)):
        for keys in seen_keys(ring, q.shape[2], sources):
            share_dq, *share = kernel_backward(
                ring.kernel,
                *(x[keys.rows] for x in (dout, q)),
                *keys.of(kv),
                *(x[keys.rows] for x in (out, lse)),
                causal=keys.tile.causal,
                scale=q.shape[-1] ** -0.5,
            )
            dq[keys.rows] += share_dq
            keys.add(dkv, *share)
    own = torch.empty_like(dkv[rank])
    dist.reduce_scatter_tensor(own, dkv.flatten(0, 1), group=ring.group)
    dk, dv = own.to(q.dtype)
    return dq.to(q.dtype), dk, dv


@dataclass(frozen=True, slots=True)
class SeenKeys:
    """What one kernel call takes: of these ranks' keys, one after another, what the mask leaves of each."""

    sources: slice
    tile: Tile

    @property
    def rows(self) -> tuple[slice, ...]:
        """Where in [B, N, S, ...] the queries are."""
        return self.tile.sequences, ALL, self.tile.queries

    def of(self, kv_P2BKSD: Tensor) -> Tensor:
        """Keys and values, [2, B, K, keys, D]: a copy where they are of several ranks."""
        kv_2BKSD: Tensor = self._places(kv_P2BKSD).movedim(0, 3).flatten(3, 4)
        return kv_2BKSD

    def add(self, dkv_P2BKSD: Tensor, dk_BKSD: Tensor, dv_BKSD: Tensor) -> None:
        """Add the gradients of these keys and values."""
        places = self._places(dkv_P2BKSD)
        for which, share in enumerate((dk_BKSD, dv_BKSD)):
            places[:, which] += share.unflatten(2, (len(places), -1)).movedim(2, 0)

    def _places(self, kv_P2BKSD: Tensor) -> Tensor:
        return kv_P2BKSD[self.sources, :, self.tile.sequences, :, self.tile.keys]


def seen_keys(ring: Ring, shard_len: int, sources: range) -> Iterator[SeenKeys]:
    """What this rank's queries see of these ranks' keys, in as few kernel calls as the mask allows.

    Neighbours of which it leaves the same, and no triangle, are taken at once: in contiguous and zigzag
    layout all earlier ranks are, and all later ones, whatever their number.
    """
    for tiles, group in groupby(sources, key=lambda source: tuple(ring.tiles(shard_len, source))):
        first, *others = group
        after = first + 1 + len(others)
        for tile in tiles:
            at_once = 1 if tile.causal else after - first
            for start in range(first, after, at_once):
                yield SeenKeys(slice(start, start + at_once), tile)


def _attend(partial: Partial | None, q: Tensor, kv: Tensor, keys: SeenKeys, ring: Ring) -> Partial:
    """The partial result with these keys taken in."""
    scale = q.shape[-1] ** -0.5
    block = kernel_forward(ring.kernel, q[keys.rows], *keys.of(kv), causal=keys.tile.causal, scale=scale)
    if partial is None:
        return Partial.first(*block)
    partial.of(keys.tile.sequences).merge(keys.tile.queries, *block)
    return partial


STRATEGY = GatherKVAttention
