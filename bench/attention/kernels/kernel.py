"""What a kernel is: attention on one device, returning output and LSE, with an explicit backward.

And what it is given of sequences packed end to end: T tokens of all of them, where each begins and ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

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
