"""Attention over sequences packed end to end, on any kernel, as flash-attn's varlen functions have it.

Shapes: T tokens of all sequences, N query heads, K KV heads, D head size. A kernel with an entry of its own
for packed sequences is called once; others are called for each sequence and block of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bench.attention.kernels import Kernel, Packing, kernel_backward, kernel_forward
from bench.attention.kernels.kernel import PackedKernel
from bench.attention.merge import Partial


def packed_forward(
    kernel: Kernel, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, packing: Packing
) -> tuple[Tensor, Tensor]:
    """Output [T, N, D] and LSE [N, T], in float32."""
    own = _own_entry(kernel, q_TND)
    if own is not None:
        return own.forward(q_TND, k_TKD, v_TKD, packing)
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
    into: tuple[Tensor, Tensor, Tensor],
    dout_TND: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_TND: Tensor,
    lse_NT: Tensor,
    packing: Packing,
) -> None:
    """Write the gradients of q [T, N, D], of k and v [T, K, D] to the three tensors of `into`."""
    own = _own_entry(kernel, qkv[0])
    if own is not None:
        # torch's operator allocates its gradients and takes no others, so this copy remains.
        for given, gradient in zip(into, own.backward(dout_TND, *qkv, out_TND, lse_NT, packing), strict=True):
            given.copy_(gradient)
        return
    q_TND, k_TKD, v_TKD = qkv
    dq_TND, dk_TKD, dv_TKD = into
    for queries, keys in packing.sequences():
        lse_BNS = lse_NT[None, :, queries].contiguous()
        dqs = []
        for seen, causal in packing.blocks(queries, keys):
            dout, q, k, v, out = _batched(
                dout_TND[queries], q_TND[queries], k_TKD[seen], v_TKD[seen], out_TND[queries]
            )
            grads = kernel_backward(kernel, dout, q, k, v, out, lse_BNS, causal=causal, scale=packing.scale)
            dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
            dk_TKD[seen], dv_TKD[seen] = dk, dv
            dqs.append(dq)
        # Those of two blocks are added in float32 and rounded once.
        dq_TND[queries] = dqs[0] if len(dqs) == 1 else dqs[0].float() + dqs[1]


def _own_entry(kernel: Kernel, q: Tensor) -> PackedKernel | None:
    return kernel.packed if kernel.packed is not None and q.device.type in kernel.packed.devices else None


def _batched(*tensors_TND: Tensor) -> tuple[Tensor, ...]:
    """Each as a batch of one, [1, N, T, D]."""
    return tuple(x.transpose(0, 1)[None] for x in tensors_TND)
