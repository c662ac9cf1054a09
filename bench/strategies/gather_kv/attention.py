"""Attention with gathered keys (arXiv:2407.21783, section 3.3.2): ranks keep queries and all-gather K and V.

Shapes: B batch, P ranks of the sequence group, S tokens of a shard, N query heads, K KV heads, D head size. K
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
from bench.strategies.gather_kv.facts import KernelCall, calls_on_local_keys, calls_on_other_keys
from bench.strategies.ring.attention import RingAttention, RingContext


class GatherKVAttention(RingAttention):
    """Attention with the shards and tiles of `ring`, for which a rank gathers all keys at once."""

    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        ring = self.ring(causal=causal)
        out: Tensor = _GatherKV.apply(q_BNSD, k_BKSD, v_BKSD, ring)  # type: ignore[no-untyped-call]
        return out

    def log_sum_exp(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        return gathered_forward(q_BNSD, k_BKSD, v_BKSD, self.ring(causal=causal))[0].lse


class _GatherKV(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: RingContext) -> Tensor:
        partial_result, kv = gathered_forward(q, k, v, ring)
        out = partial_result.out.to(q.dtype)
        ctx.ring = ring
        ctx.save_for_backward(q, kv, out, partial_result.lse)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, kv, out, lse = ctx.saved_tensors
        return *gathered_backward(dout, q, kv, out, lse, ctx.ring), None


def gathered_forward(q: Tensor, k: Tensor, v: Tensor, ring: RingContext) -> tuple[Partial, Tensor]:
    """Return output and LSE over the keys of all ranks, and the gathered K and V, [P, 2, B, K, S, D].

    The rank computes attention to its local keys while the keys of other ranks arrive.
    """
    rank, ranks = ring.group.rank(), ring.group.size()
    tiles_of = partial(ring.tiles, q.shape[2])
    kv = k.new_empty(ranks, 2, *k.shape)
    # The all-gather is in place, so that local K and V are copied only once. It does not change them, so they
    # may be read while it runs.
    local_kv = torch.stack([k, v], out=kv[rank])
    arriving = dist.all_gather_into_tensor(kv.flatten(0, 1), local_kv, group=ring.group, async_op=True)
    partial_result = None if ring.documents is None else Partial.empty(q)
    for call in calls_on_local_keys(tiles_of, rank):
        partial_result = _attend(partial_result, q, kv, call, ring.kernel)
    assert arriving is not None
    arriving.wait()
    for call in calls_on_other_keys(tiles_of, rank, ranks):
        partial_result = _attend(partial_result, q, kv, call, ring.kernel)
    assert partial_result is not None
    return partial_result, kv


def gathered_backward(
    dout: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, ring: RingContext
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, and of this rank's k and v as sums over ranks, taken in float32 or wider."""
    rank, ranks, wide = ring.group.rank(), ring.group.size(), lse.dtype
    tiles_of = partial(ring.tiles, q.shape[2])
    dq = torch.zeros_like(q, dtype=wide)
    dkv = torch.zeros(kv.shape, dtype=wide, device=kv.device)
    for call in (*calls_on_local_keys(tiles_of, rank), *calls_on_other_keys(tiles_of, rank, ranks)):
        _add_gradients((dq, dkv), (dout, q, kv, out, lse), call, ring.kernel)
    local_dkv = torch.empty_like(dkv[rank])
    dist.reduce_scatter_tensor(local_dkv, dkv.flatten(0, 1), group=ring.group)
    dk, dv = local_dkv.to(q.dtype)
    return dq.to(q.dtype), dk, dv


def _attend(
    partial_result: Partial | None, q: Tensor, kv: Tensor, call: KernelCall, kernel: Kernel
) -> Partial:
    """Return the partial result with one more kernel call merged into it; None stands for no earlier call."""
    causal, scale = call.tile.causal, q.shape[-1] ** -0.5
    block = kernel_forward(kernel, q[_rows(call)], *_keys_and_values(kv, call), causal=causal, scale=scale)
    if partial_result is None:
        return Partial.first(*block)
    partial_result.select_sequences(call.tile.sequences).merge(call.tile.queries, *block)
    return partial_result


def _add_gradients(
    into: tuple[Tensor, Tensor], tensors: tuple[Tensor, ...], call: KernelCall, kernel: Kernel
) -> None:
    """Add the gradients of one kernel call to dq [B, N, S, D] and dkv [P, 2, B, K, S, D] in `into`."""
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
    for index, share in enumerate(shares):
        _key_view(dkv, call)[:, index] += share.unflatten(2, (call.ranks, -1)).movedim(2, 0)


def _rows(call: KernelCall) -> tuple[slice, ...]:
    """Return the index of the call's queries in a [B, N, S, ...] tensor."""
    return call.tile.sequences, ALL, call.tile.queries


def _key_view(kv_P2BKSD: Tensor, call: KernelCall) -> Tensor:
    """Return a view of the call's keys and values, or of their gradients, [ranks, 2, B, K, keys, D]."""
    return kv_P2BKSD[call.sources, :, call.tile.sequences, :, call.tile.keys]


def _keys_and_values(kv_P2BKSD: Tensor, call: KernelCall) -> Tensor:
    """Return the call's keys and values, [2, B, K, keys, D], copied if they come from several ranks."""
    return _key_view(kv_P2BKSD, call).movedim(0, 3).flatten(3, 4)


STRATEGY = GatherKVAttention
