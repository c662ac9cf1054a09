"""Kernel: attention on one device with an explicit backward, and the functions that call it.

A kernel that needs as many KV heads as query heads gets repeated KV heads. Only the functions here repeat
them, just before the kernel runs: a ring repeats the current block in every ring step. If K and V were
repeated before they are sent, they would be as large as Q.

Sequences that are packed end to end reach a kernel as one tensor of T tokens, with the offsets of the
sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ON_HOST = "_bench_offsets_on_host"
"""Attribute of an offsets tensor that caches its numbers on the host."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Sequences packed end to end: their offsets, mask and scale."""

    cu_seqlens_q: Tensor
    """Offsets of the sequences' queries, `[0, end of the first, ..., T]`, int32."""
    cu_seqlens_k: Tensor
    """Offsets of the sequences' keys."""
    max_seqlen_q: int
    """Queries of the longest sequence."""
    max_seqlen_k: int
    """Keys of the longest sequence."""
    causal: bool
    """Whether the mask is causal, aligned to the bottom right: queries are the last tokens of their
    sequence."""
    scale: float
    host_offsets: tuple[int, ...] | None = None
    """`cu_seqlens_q` as numbers on the host, if the keys have the same offsets and the caller knows them."""

    @property
    def offsets(self) -> tuple[Tensor, Tensor, int, int]:
        """Offsets and longest lengths in the order in which flash-attention and torch take them."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Yield the queries and the keys of each sequence.

        Offsets of several sequences are read from the device unless `host_offsets` has them. A single
        sequence is as long as the longest, which the host knows.
        """
        offsets_q: Sequence[int] = self.host_offsets or [0, self.max_seqlen_q]
        offsets_k: Sequence[int] = self.host_offsets or [0, self.max_seqlen_k]
        if self.host_offsets is None and len(self.cu_seqlens_q) > len(offsets_q):
            offsets_q, offsets_k = _on_host(self.cu_seqlens_q), _on_host(self.cu_seqlens_k)
        for i in range(len(offsets_q) - 1):
            yield slice(offsets_q[i], offsets_q[i + 1]), slice(offsets_k[i], offsets_k[i + 1])

    def blocks(self, queries: slice, keys: slice) -> Iterator[tuple[slice, bool]]:
        """Yield the blocks of a sequence's keys that its queries see, each with whether it is causal.

        Queries under a causal mask are the last tokens. The first block is the keys of these tokens and is
        causal. The second block is all earlier keys, if there are any.
        """
        if not self.causal:
            yield keys, False
            return
        square_start = keys.stop - (queries.stop - queries.start)
        yield slice(square_start, keys.stop), True
        if square_start > keys.start:
            yield slice(keys.start, square_start), False


def _on_host(offsets: Tensor) -> list[int]:
    """Return the offsets as numbers, read from the device once per tensor.

    Reading waits for all work that is queued on the device. All layers share the tensor of a batch, so that
    only the first of them waits.
    """
    if not hasattr(offsets, ON_HOST):
        setattr(offsets, ON_HOST, offsets.tolist())
    numbers: list[int] = getattr(offsets, ON_HOST)
    return numbers


Gradients = tuple[Tensor, Tensor, Tensor]
"""Gradients of q, k and v."""
Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., Gradients]
PackedForward = Callable[[Tensor, Tensor, Tensor, Packing], tuple[Tensor, Tensor]]
PackedBackward = Callable[[Gradients, tuple[Tensor, ...], Packing], None]


@dataclass(frozen=True, slots=True)
class PackedKernel:
    """Functions of a kernel for sequences packed end to end, on GPUs."""

    forward: PackedForward
    """`forward(q_TND, k_TKD, v_TKD, packing) -> out_TND, lse_NT`."""
    backward: PackedBackward
    """`backward((dq, dk, dv), (dout, q, k, v, out, lse), packing)` writes to the three gradients. `lse` must
    be contiguous."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """Attention on one device, forward and backward, as two functions of tensors.

    Call a kernel through `kernel_forward` and `kernel_backward`, which repeat KV heads where it needs that.

    Args:
        name: Key in the table of kernels.
        forward: `forward(q_BNSD, k_BNTD, v_BNTD, causal, scale) -> out_BNSD, lse_BNS`. A causal call has as
            many keys as queries. The LSE is in float32, or in float64 for float64 inputs.
        backward: `backward(dout, q, k, v, out, lse, causal, scale) -> dq, dk, dv`.
        native_gqa: Device types on which the functions take K and V with fewer heads than Q.
        fills_gradients: Whether `backward(..., into=(dq, dk, dv))` writes to these tensors and allocates
            none.
        packed: Functions for packed sequences. Without them the sequences are computed one after another.
        module: Module of the kernel's package that the functions call; None if they call only torch.
    """

    name: str
    forward: Forward
    backward: Backward
    native_gqa: tuple[str, ...] = ()
    fills_gradients: bool = False
    packed: PackedKernel | None = None
    module: str | None = None


def attend(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, kernel: Kernel, causal: bool) -> Tensor:
    """Return differentiable attention with scale 1/sqrt(D), [B, N, S, D]."""
    scale = q_BNSD.shape[-1] ** -0.5
    return attend_with_lse(q_BNSD, k_BKTD, v_BKTD, kernel=kernel, causal=causal, scale=scale)[0]


def attend_with_lse(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, kernel: Kernel, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return differentiable attention [B, N, S, D], and its LSE [B, N, S] without a gradient."""
    out_and_lse: tuple[Tensor, Tensor] = _Attend.apply(q_BNSD, k_BKTD, v_BKTD, kernel, causal, scale)  # type: ignore[no-untyped-call]
    return out_and_lse


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.call = kernel, causal, scale
        out, lse = kernel_forward(kernel, q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # else torch allocates zeros as the gradient of the LSE
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor, _: None) -> tuple[Tensor | None, ...]:
        kernel, causal, scale = ctx.call
        q, k, v, out, lse = ctx.saved_tensors
        grads = kernel_backward(kernel, dout, q, k, v, out, lse, causal=causal, scale=scale)
        return *grads, None, None, None


def kernel_forward(
    kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute attention on one device.

        >>> out, lse = bench.kernel_forward(strategy.kernel, q, k, v, causal=True, scale=scale)
        >>> out.shape == q.shape, lse.shape == q.shape[:-1]
        (True, True)

    Args:
        kernel: Kernel to run. KV heads are repeated if it needs that on this device.
        q: Queries [B, N, S, D].
        k: Keys [B, K, T, D]. N must be a multiple of K.
        v: Values [B, K, T, D].
        causal: Whether query i sees keys 0 to i only; needs S = T.
        scale: Factor on the scores, usually 1/sqrt(D).

    Returns:
        The output [B, N, S, D] and the LSE [B, N, S]: the natural log of the sum of exponentials of the
        scaled scores, in float32, or in float64 for float64 inputs.
    """
    repeats = _kv_repeats(kernel, q, k)
    return kernel.forward(q, _repeat_heads(k, repeats), _repeat_heads(v, repeats), causal, scale)


def kernel_backward(
    kernel: Kernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
) -> Gradients:
    """Compute the gradients of attention on one device.

        >>> out, lse = bench.kernel_forward(strategy.kernel, q, k, v, causal=True, scale=scale)
        >>> dq, dk, dv = bench.kernel_backward(
        ...     strategy.kernel, torch.ones_like(out), q, k, v, out, lse, causal=True, scale=scale
        ... )
        >>> dk.shape == k.shape
        True

    Args:
        kernel: Kernel to run. KV heads are repeated if it needs that on this device, and their gradients are
            summed.
        dout: Gradient of the output, [B, N, S, D].
        q: Queries [B, N, S, D].
        k: Keys [B, K, T, D].
        v: Values [B, K, T, D].
        out: Output [B, N, S, D]. If `k` and `v` are one block of the keys, `out` and `lse` are those over all
            keys.
        lse: LSE [B, N, S].
        causal: Whether query i sees keys 0 to i only; needs S = T.
        scale: Factor on the scores, as in the forward.

    Returns:
        The gradients of q, k and v, in their shapes.
    """
    return _backward(kernel, (dout, q, k, v, out, lse), causal, scale)


def kernel_backward_into(
    kernel: Kernel, into: Gradients, *tensors: Tensor, causal: bool, scale: float
) -> None:
    """Compute the gradients of `kernel_backward` and write them to three tensors.

    `into` has a tensor for each of dq, dk and dv. They are copied to it unless the kernel can fill it itself;
    the gradients of repeated KV heads are summed into it. `tensors` are dout, q, k, v, out and lse. All other
    arguments are those of `kernel_backward`.
    """
    _backward(kernel, tensors, causal, scale, into)


def _backward(
    kernel: Kernel, tensors: tuple[Tensor, ...], causal: bool, scale: float, into: Gradients | None = None
) -> Gradients:
    dout, q, k, v, out, lse = tensors
    repeats = _kv_repeats(kernel, q, k)
    k, v = _repeat_heads(k, repeats), _repeat_heads(v, repeats)
    fills = {"into": into} if kernel.fills_gradients and repeats == 1 else {}
    # CUDA kernels read the LSE as if it were contiguous, but rows that a ring cuts from a longer LSE are not.
    gradients = kernel.backward(dout, q, k, v, out, lse.contiguous(), causal, scale, **fills)
    if into is None:
        dq, dk, dv = gradients
        return dq, _sum_groups(dk, repeats), _sum_groups(dv, repeats)
    if not fills:
        write_gradients(into, gradients, repeats)
    return into


def write_gradients(into: Gradients, gradients: Gradients, repeats: int) -> None:
    """Copy dq to its target, and sum the gradients of KV heads that were repeated into theirs."""
    into[0].copy_(gradients[0])
    for target, gradient in zip(into[1:], gradients[1:], strict=True):
        if repeats == 1:
            target.copy_(gradient)
        else:
            torch.sum(gradient.unflatten(1, (-1, repeats)), dim=2, dtype=target.dtype, out=target)


def _kv_repeats(kernel: Kernel, q: Tensor, k: Tensor) -> int:
    """Return the number of times that each KV head must be repeated for this kernel on this device."""
    return 1 if q.device.type in kernel.native_gqa else q.shape[1] // k.shape[1]


def _repeat_heads(kv: Tensor, repeats: int) -> Tensor:
    return kv if repeats == 1 else kv.repeat_interleave(repeats, dim=1)


def _sum_groups(grad: Tensor, repeats: int) -> Tensor:
    return grad if repeats == 1 else grad.unflatten(1, (-1, repeats)).sum(dim=2)
