"""Attention over sequences that are packed end to end, as in flash-attn's varlen functions, on any kernel.

A kernel with functions for packed sequences is called once. Any other kernel is called for each sequence and
block of keys. Shapes: B batch, N query heads, K KV heads, D head size. T is the tokens of all sequences in a
packed tensor [T, N, D], and those of one sequence in a batch [B, N, T, D].
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from bench.attention.documents import Documents
from bench.attention.kernels import Kernel, Packing, kernel_backward, kernel_forward
from bench.attention.kernels.kernel import Gradients, PackedKernel
from bench.attention.merge import Partial


def packed_forward(
    kernel: Kernel, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, packing: Packing
) -> tuple[Tensor, Tensor]:
    """Return attention within each packed sequence, as output and LSE.

    The output [T, N, D] has the dtype of `q_TND`. The LSE [N, T] is float32, or float64 for float64 inputs.
    """
    functions = _packed_functions(kernel, q_TND)
    if functions is not None:
        return functions.forward(q_TND, k_TKD, v_TKD, packing)
    out_TND = torch.empty_like(q_TND)
    lse_dtype = torch.promote_types(q_TND.dtype, torch.float32)
    lse_NT = q_TND.new_empty((q_TND.shape[1], q_TND.shape[0]), dtype=lse_dtype)
    for queries, keys in packing.sequences():
        partial = None
        for block, causal in packing.blocks(queries, keys):
            qkv = _as_batch_of_one(q_TND[queries], k_TKD[block], v_TKD[block])
            block_result = kernel_forward(kernel, *qkv, causal=causal, scale=packing.scale)
            if partial is None:
                partial = Partial.first(*block_result)
            else:
                partial.merge(slice(None), *block_result)
        assert partial is not None
        out_TND[queries] = partial.out[0].transpose(0, 1).to(q_TND.dtype)
        lse_NT[:, queries] = partial.lse[0]
    return out_TND, lse_NT


def packed_backward(
    kernel: Kernel,
    into: Gradients,
    dout_TND: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out_TND: Tensor,
    lse_NT: Tensor,
    packing: Packing,
) -> None:
    """Write the gradients of q [T, N, D], k and v [T, K, D] to the three tensors of `into`."""
    functions = _packed_functions(kernel, qkv[0])
    if functions is not None:
        functions.backward(into, (dout_TND, *qkv, out_TND, lse_NT.contiguous()), packing)
        return
    q_TND, k_TKD, v_TKD = qkv
    dq_TND, dk_TKD, dv_TKD = into
    for queries, keys in packing.sequences():
        lse_BNS = lse_NT[None, :, queries].contiguous()
        dqs = []
        for block, causal in packing.blocks(queries, keys):
            dout, q, k, v, out = _as_batch_of_one(
                dout_TND[queries], q_TND[queries], k_TKD[block], v_TKD[block], out_TND[queries]
            )
            grads = kernel_backward(kernel, dout, q, k, v, out, lse_BNS, causal=causal, scale=packing.scale)
            dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
            dk_TKD[block], dv_TKD[block] = dk, dv
            dqs.append(dq)
        # The gradients of two blocks are added in float32 or wider and rounded once.
        dq_TND[queries] = dqs[0] if len(dqs) == 1 else dqs[0].to(lse_NT.dtype) + dqs[1]


def packing_of(documents: Documents, scale: float, device: torch.device) -> Packing:
    """Return the packing of the documents of a batch that `flatten_batch` has laid end to end."""
    ends = [
        sequence * documents.tokens + document.stop
        for sequence in range(len(documents.ends))
        for document in documents.positions_of(sequence)
    ]
    offsets = copy_to_device(torch.tensor([0, *ends], dtype=torch.int32), device)
    longest = max(stop - start for start, stop in pairwise([0, *ends]))
    return Packing(offsets, offsets, longest, longest, causal=True, scale=scale, host_offsets=(0, *ends))


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor from the host to a device.

    A GPU copies from pinned memory, in stream order and without blocking the host. An expanded tensor is made
    contiguous first, as torch cannot pin a tensor whose rows share memory.
    """
    if device.type == "cpu":
        return tensor
    return tensor.contiguous().pin_memory().to(device, non_blocking=True)


def positions_in_documents(documents: Documents) -> Tensor:
    """Return the position of each token in its document, [B, T], in host memory."""
    sequences = map(documents.positions_of, range(len(documents.ends)))
    return torch.stack(
        [torch.cat([torch.arange(len(document)) for document in sequence]) for sequence in sequences]
    )


def attend_packed(
    q_BNTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, kernel: Kernel, packing: Packing
) -> Tensor:
    """Return differentiable causal attention within the documents of whole sequences, [B, N, T, D]."""
    qkv = [flatten_batch(x) for x in (q_BNTD, k_BKTD, v_BKTD)]
    return unflatten_batch(attend_end_to_end(*qkv, kernel=kernel, packing=packing)[0], len(q_BNTD))


def attend_end_to_end(
    q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, *, kernel: Kernel, packing: Packing
) -> tuple[Tensor, Tensor]:
    """Return differentiable attention within each packed sequence, [T, N, D], and its detached LSE [N, T]."""
    out_and_lse: tuple[Tensor, Tensor] = _AttendPacked.apply(q_TND, k_TKD, v_TKD, kernel, packing)  # type: ignore[no-untyped-call]
    return out_and_lse


def packed_lse(q_BNTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, kernel: Kernel, packing: Packing) -> Tensor:
    """Return the LSE of causal attention within the documents of whole sequences, [B, N, T]."""
    q, k, v = (flatten_batch(x) for x in (q_BNTD, k_BKTD, v_BKTD))
    lse_NBT: Tensor = packed_forward(kernel, q, k, v, packing)[1].unflatten(1, (len(q_BNTD), -1))
    return lse_NBT.transpose(0, 1)


class _AttendPacked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, packing: Packing
    ) -> tuple[Tensor, Tensor]:
        ctx.call = kernel, packing
        out_TND, lse_NT = packed_forward(kernel, q, k, v, packing)
        ctx.save_for_backward(q, k, v, out_TND, lse_NT)
        ctx.mark_non_differentiable(lse_NT)
        ctx.set_materialize_grads(False)  # else torch allocates zeros as the gradient of the LSE
        return out_TND, lse_NT

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
        kernel, packing = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        into = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        packed_backward(kernel, into, dout, (q, k, v), out, lse, packing)
        return *into, None, None


def flatten_batch(x_BNTD: Tensor) -> Tensor:
    """Reshape [B, N, T, D] to [B * T, N, D], without a copy if the memory already has this order."""
    return x_BNTD.transpose(1, 2).flatten(0, 1)


def unflatten_batch(x_TND: Tensor, batch: int) -> Tensor:
    """Reshape [B * T, N, D] back to [B, N, T, D]."""
    x_BTND: Tensor = x_TND.unflatten(0, (batch, -1))
    return x_BTND.transpose(1, 2)


def _packed_functions(kernel: Kernel, q: Tensor) -> PackedKernel | None:
    """Return the kernel's functions for packed sequences; None if it has none for this device."""
    return kernel.packed if q.device.type == "cuda" else None


def _as_batch_of_one(*tensors_TND: Tensor) -> tuple[Tensor, ...]:
    """Reshape tensors [T, N, D] to [1, N, T, D]."""
    return tuple(x.transpose(0, 1)[None] for x in tensors_TND)
