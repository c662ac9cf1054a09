"""A kernel: attention on one device, returning output and LSE, with an explicit backward; and calls of one.

KV heads are repeated here and nowhere else, on the rank that computes and just before it does. A ring repeats
the block at hand in every ring step: repeated before they are sent, K and V would be as many bytes as Q.

Of sequences packed end to end a kernel is given T tokens of all of them, and where each begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

ON_HOST = "_bench_offsets_on_host"
"""The attribute of offsets that a package made in which their numbers are kept."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Where each sequence's queries and keys begin and end: `[0, end of the first, ..., T]` of both."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    causal: bool
    """Aligned to the bottom right: a sequence's queries are the last of its tokens."""
    scale: float
    ends: tuple[int, ...] | None = None
    """`cu_seqlens_q` on the host, where queries and keys end alike and the caller knows it."""

    @property
    def offsets(self) -> tuple[Tensor, Tensor, int, int]:
        """In the order in which flash-attention and torch take them."""
        return self.cu_seqlens_q, self.cu_seqlens_k, self.max_seqlen_q, self.max_seqlen_k

    def sequences(self) -> Iterator[tuple[slice, slice]]:
        """Queries and keys of each sequence.

        One alone is as long as the longest, which the host knows. Several that it does not know are read from
        the device.
        """
        ends_q: Sequence[int] = self.ends or [0, self.max_seqlen_q]
        ends_k: Sequence[int] = self.ends or [0, self.max_seqlen_k]
        if self.ends is None and len(self.cu_seqlens_q) > len(ends_q):
            ends_q, ends_k = _on_host(self.cu_seqlens_q), _on_host(self.cu_seqlens_k)
        for i in range(len(ends_q) - 1):
            yield slice(ends_q[i], ends_q[i + 1]), slice(ends_k[i], ends_k[i + 1])

    def blocks(self, queries: slice, keys: slice) -> Iterator[tuple[slice, bool]]:
        """The keys that these queries see: a causal square of their own, and all of what is before it."""
        if not self.causal:
            yield keys, False
            return
        own = keys.stop - (queries.stop - queries.start)
        yield slice(own, keys.stop), True
        if own > keys.start:
            yield slice(keys.start, own), False


def _on_host(offsets: Tensor) -> list[int]:
    """Read once a batch, as every layer is given this tensor: it waits for all that the device has to do."""
    if not hasattr(offsets, ON_HOST):
        setattr(offsets, ON_HOST, offsets.tolist())
    known: list[int] = getattr(offsets, ON_HOST)
    return known


Gradients = tuple[Tensor, Tensor, Tensor]
"""Of q, k and v."""
Forward = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
Backward = Callable[..., Gradients]
PackedForward = Callable[[Tensor, Tensor, Tensor, Packing], tuple[Tensor, Tensor]]
PackedBackward = Callable[[Gradients, tuple[Tensor, ...], Packing], None]


@dataclass(frozen=True, slots=True)
class PackedKernel:
    """A kernel's own entry for sequences packed end to end."""

    devices: tuple[str, ...]
    """Where it has one."""
    forward: PackedForward
    """`forward(q_TND, k_TKD, v_TKD, packing) -> out_TND, lse_NT`."""
    backward: PackedBackward
    """`backward((dq, dk, dv), (dout, q, k, v, out, lse), packing)` writes to the given gradients.

    The LSE is contiguous.
    """


@dataclass(frozen=True, slots=True)
class Kernel:
    """Attention on one device, forward and backward."""

    name: str
    forward: Forward
    """`forward(q_BNSD, k_BNTD, v_BNTD, causal, scale) -> out_BNSD, lse_BNS`; causal with S = T only."""
    backward: Backward
    """`backward(dout, q, k, v, out, lse, causal, scale) -> dq, dk, dv`."""
    native_gqa: tuple[str, ...] = ()
    """Devices on which it takes K and V with fewer heads than Q; on others heads are repeated first."""
    fills_gradients: bool = False
    """Whether `backward(..., into=(dq, dk, dv))` writes to these tensors and allocates none."""
    packed: PackedKernel | None = None
    """Its own entry for packed sequences; without one they are taken one after another."""
    module: str | None = None
    """Of its package, what it calls; None where all of it is torch's."""


def attend(q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, kernel: Kernel, causal: bool) -> Tensor:
    """Differentiable attention of one device, [B, N, S, D], scaled by 1/sqrt(D)."""
    scale = q_BNSD.shape[-1] ** -0.5
    return attend_with_lse(q_BNSD, k_BKTD, v_BKTD, kernel=kernel, causal=causal, scale=scale)[0]


def attend_with_lse(
    q_BNSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, kernel: Kernel, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Differentiable attention at any scale: output [B, N, S, D], and the LSE [B, N, S] with no gradient."""
    found: tuple[Tensor, Tensor] = _Attend.apply(q_BNSD, k_BKTD, v_BKTD, kernel, causal, scale)  # type: ignore[no-untyped-call]
    return found


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.call = kernel, causal, scale
        out, lse = kernel_forward(kernel, q, k, v, causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.mark_non_differentiable(lse)
        ctx.set_materialize_grads(False)  # else torch makes zeros for the gradient that the LSE has not
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
    """Output [B, N, S, D] and LSE [B, N, S], KV heads repeated where the kernel needs it."""
    groups = _repeats(kernel, q, k)
    return kernel.forward(q, _repeat(k, groups), _repeat(v, groups), causal, scale)


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
    """Return dq, dk, dv in the shapes of q, k, v: gradients of repeated KV heads are summed back."""
    return _backward(kernel, (dout, q, k, v, out, lse), causal, scale)


def kernel_backward_into(
    kernel: Kernel, into: Gradients, *tensors: Tensor, causal: bool, scale: float
) -> None:
    """Write the gradients of `kernel_backward` to given tensors: copied, unless the kernel fills them."""
    if kernel.fills_gradients and _repeats(kernel, *tensors[1:3]) == 1:
        _backward(kernel, tensors, causal, scale, into=into)
        return
    for given, gradient in zip(into, _backward(kernel, tensors, causal, scale), strict=True):
        given.copy_(gradient)


def _backward(
    kernel: Kernel, tensors: tuple[Tensor, ...], causal: bool, scale: float, **keywords: Gradients
) -> Gradients:
    dout, q, k, v, out, lse = tensors
    groups = _repeats(kernel, q, k)
    k, v = _repeat(k, groups), _repeat(v, groups)
    # CUDA kernels read the LSE as if it were contiguous; a ring's rows of a longer one are not.
    dq, dk, dv = kernel.backward(dout, q, k, v, out, lse.contiguous(), causal, scale, **keywords)
    return dq, _sum_groups(dk, groups), _sum_groups(dv, groups)


def _repeats(kernel: Kernel, q: Tensor, k: Tensor) -> int:
    """Return how often this kernel needs each KV head repeated on this device."""
    return 1 if q.device.type in kernel.native_gqa else q.shape[1] // k.shape[1]


def _repeat(kv: Tensor, groups: int) -> Tensor:
    return kv if groups == 1 else kv.repeat_interleave(groups, dim=1)


def _sum_groups(grad: Tensor, groups: int) -> Tensor:
    return grad if groups == 1 else grad.unflatten(1, (-1, groups)).sum(dim=2)
