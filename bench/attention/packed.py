"""Attention over sequences packed end to end, on any kernel, as flash-attn's varlen functions have it.

Shapes: T tokens of all sequences, N query heads, K KV heads, D head size. A causal mask is aligned to the
bottom right: where a sequence has more keys than queries, its queries are the last of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.attention.kernels import Kernel, kernel_backward, kernel_forward
from bench.attention.merge import Partial


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each sequence's queries and keys begin and end: `[0, end of the first, ..., T]` of both."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    causal: bool
    scale: float

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Queries and keys of each sequence."""
        starts_q, starts_k = self.cu_seqlens_q.tolist(), self.cu_seqlens_k.tolist()
        for i in range(len(starts_q) - 1):
            yield slice(starts_q[i], starts_q[i + 1]), slice(starts_k[i], starts_k[i + 1])

    def blocks(self, queries: slice, keys: slice) -> Iterator[tuple[slice, bool]]:
        """The keys that these queries see: a causal square of their own, and all of what is before it."""
        if not self.causal:
            yield keys, False
            return
        own = keys.stop - (queries.stop - queries.start)
        yield slice(own, keys.stop), True
        if own > keys.start:
            yield slice(keys.start, own), False


def packed_forward(
    kernel: Kernel, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, packing: Packing
) -> tuple[Tensor, Tensor]:
    """Output [T, N, D] and LSE [N, T], in float32."""
    out_TND = torch.empty_like(q_TND)
    lse_NT = q_TND.new_empty((q_TND.shape[1], q_TND.shape[0]), dtype=torch.float32)
    for queries, keys in packing.sequences():
        partial = None
        for seen, causal in packing.blocks(queries, keys):
            qkv = _batched(q_TND[queries], k_TKD[seen], v_TKD[seen])
            block = kernel_forward(kernel, *qkv, causal=causal, scale=packing.scale)
            if partial is None:
                partial = Partial.first(*block)
            else:
                partial.merge(slice(None), *block)
        assert partial is not None
        out_TND[queries] = partial.out[0].transpose(0, 1).to(q_TND.dtype)
        lse_NT[:, queries] = partial.lse[0].float()
    return out_TND, lse_NT


def packed_backward(
    kernel: Kernel,
    dout_TND: Tensor,
    qkv: tuple[Tensor, ...],
    out_TND: Tensor,
    lse_NT: Tensor,
    packing: Packing,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [T, N, D], of k and v [T, K, D], in the dtypes of q, k and v."""
    q_TND, k_TKD, v_TKD = qkv
    dq_TND = torch.zeros_like(q_TND, dtype=torch.float32)
    dk_TKD, dv_TKD = torch.zeros_like(k_TKD), torch.zeros_like(v_TKD)
    for queries, keys in packing.sequences():
        lse_BNS = lse_NT[None, :, queries].contiguous()
        for seen, causal in packing.blocks(queries, keys):
            dout, q, k, v, out = _batched(
                dout_TND[queries], q_TND[queries], k_TKD[seen], v_TKD[seen], out_TND[queries]
            )
            grads = kernel_backward(kernel, dout, q, k, v, out, lse_BNS, causal=causal, scale=packing.scale)
            dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
            dq_TND[queries] += dq
            dk_TKD[seen], dv_TKD[seen] = dk, dv
    return dq_TND.to(q_TND.dtype), dk_TKD, dv_TKD


def _batched(*tensors_TND: Tensor) -> tuple[Tensor, ...]:
    """Each as a batch of one, [1, N, T, D]."""
    return tuple(x.transpose(0, 1)[None] for x in tensors_TND)
