"""Ring Self-Attention (arXiv:2105.13120), which computes all scores of a rank's queries before their softmax.

Keys are passed round the ring for the scores, then values for the output. The probabilities are saved.

Shapes: B batch, P ranks of the ring, S tokens of a shard, N query heads, K KV heads, G = N/K query heads of
one KV head, D head size, R queries and T keys of a tile.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench.attention.layouts import LAYOUTS, Tile
from bench.attention.rotation import rotate
from bench.strategies.ring.attention import RingContext
from bench.strategies.strategy import Strategy


class RingSelfAttention(Strategy):
    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        ring = RingContext(self.groups.ring, self.kernel, LAYOUTS[self.cell.layout], causal, self.documents)
        q_BKGSD = q_BNSD.unflatten(1, (k_BKSD.shape[1], -1))
        out_BKGSD: Tensor = _RingSelfAttention.apply(q_BKGSD, k_BKSD, v_BKSD, ring)  # type: ignore[no-untyped-call]
        return out_BKGSD.flatten(1, 2)


class _RingSelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingContext) -> Tensor:
        probs = ring_scores(q, k, ring).flatten(-2).softmax(dim=-1).unflatten(-1, (ring.group.size(), -1))
        out = ring_output(probs, v, ring)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, probs, out)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, probs, out = ctx.saved_tensors
        dq, dkv = ring_backward(dout, q, torch.stack([k, v]), probs, out, ctx.ring)
        return dq, dkv[0], dkv[1], None


def ring_scores(q_BKGSD: Tensor, k_BKSD: Tensor, ring: RingContext) -> Tensor:
    """Return scaled scores of this rank's queries and all keys, [B, K, G, S, P, S], -inf where masked."""
    scaled, shard_len = q_BKGSD * q_BKGSD.shape[-1] ** -0.5, k_BKSD.shape[2]
    shape = *q_BKGSD.shape[:4], ring.group.size(), shard_len
    scores = q_BKGSD.new_full(shape, -torch.inf)
    for source, keys in round_trip(k_BKSD, ring):
        for tile in ring.tiles(shard_len, source):
            products = _matmul(_rows(scaled, tile), _keys(keys, tile).mT)
            _block(scores, source, tile).copy_(_mask_later_keys(products) if tile.causal else products)
    return scores


def ring_output(probs_BKGSPS: Tensor, v_BKSD: Tensor, ring: RingContext) -> Tensor:
    """Return probabilities times all values, [B, K, G, S, D], a view of a tensor with tokens first."""
    batch, kv_heads, groups, shard_len = probs_BKGSPS.shape[:4]
    wide = torch.promote_types(v_BKSD.dtype, torch.float32)
    out_BSKGD = v_BKSD.new_zeros(batch, shard_len, kv_heads, groups, v_BKSD.shape[3], dtype=wide)
    out_BKGSD = out_BSKGD.permute(0, 2, 3, 1, 4)
    for source, values in round_trip(v_BKSD, ring):
        for tile in ring.tiles(shard_len, source):
            _rows(out_BKGSD, tile).add_(_matmul(_block(probs_BKGSPS, source, tile), _keys(values, tile)))
    return out_BKGSD.to(v_BKSD.dtype)


def ring_backward(
    dout: Tensor, q: Tensor, kv: Tensor, probs: Tensor, out: Tensor, ring: RingContext
) -> tuple[Tensor, Tensor]:
    """Return the gradients of q and of this rank's kv [2, B, K, S, D], in their dtypes.

    A rank's keys and values are passed on together. The sum of their gradients goes round the ring behind
    them, as in a ring reduce-scatter: the rank after their owner starts it, every rank adds its part, and
    after P-1 hops the sum reaches the owner.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    delta = (dout.to(wide) * out).sum(dim=-1, keepdim=True).to(q.dtype)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    local_dkv, returning = torch.zeros(kv.shape, dtype=wide, device=kv.device), None
    for source, (k, v) in round_trip(kv, ring):
        is_local = source == ring.group.rank()
        dkv = local_dkv if is_local else torch.zeros_like(local_dkv)
        for tile in ring.tiles(k.shape[2], source):
            queries = _rows(dout, tile), _rows(q, tile), _rows(delta, tile)
            keys = _keys(k, tile), _keys(v, tile)
            gradients = block_backward(queries, keys, _block(probs, source, tile))
            for total, part in zip((_rows(dq, tile), *(_keys(x, tile) for x in dkv)), gradients, strict=True):
                total.add_(part)
        if not is_local:
            returning = rotate(dkv if returning is None else dkv.add_(returning.wait()[0]), ring.group)
    if returning is not None:
        local_dkv += returning.wait()[0]
    return dq.to(q.dtype), local_dkv.to(kv.dtype)


def block_backward(
    queries: tuple[Tensor, Tensor, Tensor], keys: tuple[Tensor, Tensor], probs_BKGRT: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a block's queries, keys and values, given its probabilities.

    The gradient of the scores is dS = P * (dP - delta), where delta is the sum of dout * out over a row.
    `queries` are dout, the queries and delta; `keys` are keys and values.
    """
    (dout_BKGRD, q_BKGRD, delta_BKGR1), (k_BKTD, v_BKTD) = queries, keys
    scale = q_BKGRD.shape[-1] ** -0.5
    dscores = _matmul(dout_BKGRD, v_BKTD.mT).sub_(delta_BKGR1).mul_(probs_BKGRT).mul_(scale)
    dq_BKGRD = _matmul(dscores, k_BKTD)
    dk_BKTD, dv_BKTD = _transposed_matmul(dscores, q_BKGRD), _transposed_matmul(probs_BKGRT, dout_BKGRD)
    return dq_BKGRD, dk_BKTD, dv_BKTD


def round_trip(tensor: Tensor, ring: RingContext) -> Iterator[tuple[int, Tensor]]:
    """Yield (rank, that rank's tensor) for all ranks, this rank first, while the next tensor arrives."""
    *all_but_last, last = ring.sources()
    for source in all_but_last:
        arriving = rotate(tensor, ring.group)
        yield source, tensor
        (tensor,) = arriving.wait()
    yield last, tensor


def _rows(x_BKGSD: Tensor, tile: Tile) -> Tensor:
    return x_BKGSD[tile.sequences, :, :, tile.queries]


def _keys(x_BKSD: Tensor, tile: Tile) -> Tensor:
    return x_BKSD[tile.sequences, :, tile.keys]


def _block(x_BKGSPS: Tensor, source: int, tile: Tile) -> Tensor:
    return x_BKGSPS[tile.sequences, :, :, tile.queries, source, tile.keys]


def _mask_later_keys(scores_BKGRT: Tensor) -> Tensor:
    """Set the scores of keys after their query to -inf, in place."""
    hidden = torch.ones(scores_BKGRT.shape[-2:], dtype=torch.bool, device=scores_BKGRT.device).triu(
        diagonal=1
    )
    return scores_BKGRT.masked_fill_(hidden, -torch.inf)


def _matmul(x_BKGRD: Tensor, y_BKDT: Tensor) -> Tensor:
    """Return x @ y, [B, K, G, R, T], with one product for all query heads that share a KV head."""
    product: Tensor = torch.matmul(x_BKGRD.flatten(2, 3), y_BKDT).unflatten(2, x_BKGRD.shape[2:4])
    return product


def _transposed_matmul(x_BKGRT: Tensor, y_BKGRD: Tensor) -> Tensor:
    """Return x^T @ y summed over the query heads that share a KV head, [B, K, T, D]."""
    return torch.matmul(x_BKGRT.flatten(2, 3).mT, y_BKGRD.flatten(2, 3))


STRATEGY = RingSelfAttention
