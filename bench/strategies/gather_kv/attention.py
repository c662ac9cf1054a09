"""Gathered keys (arXiv:2407.21783, section 3.3.2): every rank gathers all K and V and keeps its queries.

Shapes: B batch, P ranks that share a sequence, S tokens of a shard, N query heads, K KV heads, D head size. K
and V are gathered as one tensor, [P, 2, B, K, S, D].
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.attention.kernels import Kernel, kernel_backward, kernel_forward
from bench.attention.layouts import ALL
from bench.attention.merge import Partial
from bench.strategies.gather_kv.facts import KernelCall, calls_on_others, calls_on_own
from bench.strategies.ring.attention import RingAttention, RingContext


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
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingContext) -> Tensor:
        seen, kv = gathered_forward(q, k, v, ring)
        out = seen.out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, seen.lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, kv, out, lse = ctx.saved_tensors
        return *gathered_backward(dout, q, kv, out, lse, ctx.ring), None


def gathered_forward(q: Tensor, k: Tensor, v: Tensor, ring: RingContext) -> tuple[Partial, Tensor]:
    """Output and LSE over all ranks' keys, and these with their values, [P, 2, B, K, S, D].

    This rank attends to its own while the others' arrive.
    """
    rank, ranks = ring.group.rank(), ring.group.size()
    tiles_of = partial(ring.tiles, q.shape[2])
    kv = k.new_empty(ranks, 2, *k.shape)
    # In place, so that one's own are copied once; they may be read meanwhile, as they stay what they are.
    own = torch.stack([k, v], out=kv[rank])
    arriving = dist.all_gather_into_tensor(kv.flatten(0, 1), own, group=ring.group, async_op=True)
    seen = None if ring.documents is None else Partial.nothing(q)
    for call in calls_on_own(tiles_of, rank):
        seen = _attend(seen, q, kv, call, ring.kernel)
    assert arriving is not None
    arriving.wait()
    for call in calls_on_others(tiles_of, rank, ranks):
        seen = _attend(seen, q, kv, call, ring.kernel)
    assert seen is not None
    return seen, kv


def gathered_backward(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, ring: RingContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q and of this rank's own k and v: of its keys, those of all ranks are added up, wide."""
    rank, ranks, wide = ring.group.rank(), ring.group.size(), lse.dtype
    tiles_of = partial(ring.tiles, q.shape[2])
    dq = torch.zeros_like(q, dtype=wide)
    dkv = torch.zeros(kv.shape, dtype=wide, device=kv.device)
    for call in (*calls_on_own(tiles_of, rank), *calls_on_others(tiles_of, rank, ranks)):
        _add_gradients((dq, dkv), (dout, q, kv, out, lse), call, ring.kernel)
    own = torch.empty_like(dkv[rank])
    dist.reduce_scatter_tensor(own, dkv.flatten(0, 1), group=ring.group)
    dk, dv = own.to(q.dtype)
    return dq.to(q.dtype), dk, dv


def _attend(seen: Partial | None, q: Tensor, kv: Tensor, call: KernelCall, kernel: Kernel) -> Partial:
    """The partial result with this call's keys taken in."""
    causal, scale = call.tile.causal, q.shape[-1] ** -0.5
    block = kernel_forward(kernel, q[_rows(call)], *_keys_and_values(kv, call), causal=causal, scale=scale)
    if seen is None:
        return Partial.first(*block)
    seen.of(call.tile.sequences).merge(call.tile.queries, *block)
    return seen


def _add_gradients(
    into: tuple[Tensor, Tensor], tensors: tuple[Tensor, ...], call: KernelCall, kernel: Kernel
) -> None:
    """Add this call's share to dq [B, N, S, D] and dkv [P, 2, B, K, S, D]."""
    (dq, dkv), (dout, q, kv, out, lse), rows = into, tensors, _rows(call)
    share_dq, *shares = kernel_backward(
        kernel,
        *(x[rows] for x in (dout, q)),
        *_keys_and_values(kv, call),
        *(x[rows] for x in (out, lse)),
        causal=call.tile.causal,
        scale=q.shape[-1] ** -0.5,
    )
    dq[rows] += share_dq
    for which, share in enumerate(shares):
        _places(dkv, call)[:, which] += share.unflatten(2, (call.ranks, -1)).movedim(2, 0)


def _rows(call: KernelCall) -> tuple[slice, ...]:
    """Where in [B, N, S, ...] the call's queries are."""
    return call.tile.sequences, ALL, call.tile.queries


def _places(kv_P2BKSD: Tensor, call: KernelCall) -> Tensor:
    """Its keys and values, or their gradients, where they are."""
    return kv_P2BKSD[call.sources, :, call.tile.sequences, :, call.tile.keys]


def _keys_and_values(kv_P2BKSD: Tensor, call: KernelCall) -> Tensor:
    """A call's keys and values for the kernel, [2, B, K, keys, D]: a copy if several ranks hold them."""
    return _places(kv_P2BKSD, call).movedim(0, 3).flatten(3, 4)


STRATEGY = GatherKVAttention
