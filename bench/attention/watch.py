"""When attention begins and ends inside a model, and one call of it kept apart from tensor memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.attention.documents import Documents
from bench.common.kept_errors import KeptErrors

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """Return a view of the tensor's memory as integers, which numpy has; bf16 it has not."""
    return tensor.view(_INTEGERS[tensor.element_size()])


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor's numbers in host memory. It is no tensor, so that code that counts tensors leaves it out."""

    numbers: np.ndarray
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> HostCopy:
        bits = bits_of(tensor.detach().cpu())
        return cls(np.array(bits.numpy()), tensor.dtype)

    def on(self, device: torch.device) -> Tensor:
        """The tensor again."""
        return torch.from_numpy(self.numbers).view(self.dtype).to(device)


@dataclass(slots=True)
class CapturedCall:
    """The first call that trains after this was made: q, k, v, out and their gradients, [B, heads, S, D]."""

    around: Callable[[], AbstractContextManager[None]] = nullcontext
    """Entered around the copying: what copies take is no part of the step."""
    copies: dict[str, HostCopy] = field(default_factory=dict)
    documents: Documents | None = None
    """That attention had to stay within."""

    def wants(self, q: Tensor) -> bool:
        return not self.copies and torch.is_grad_enabled() and q.requires_grad

    def keep(self, **tensors: Tensor | None) -> None:
        with self.around():
            self.copies |= {name: HostCopy.of(x) for name, x in tensors.items() if x is not None}

    @property
    def is_whole(self) -> bool:
        return {"q", "k", "v", "out", "dq", "dk", "dv", "dout"} <= self.copies.keys()

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """The tensors by name; what attention returned as [B, S, N, D] is turned."""
        found = {name: copy.on(device) for name, copy in self.copies.items()}
        for name in ("out", "dout"):
            if found[name].shape != found["q"].shape:
                found[name] = found[name].transpose(1, 2)
        return found


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class AttentionWatch:
    """Whether attention is running, when it did, and which shapes it was given."""

    is_inside: bool
    shapes: set[tuple[int, int, int]]
    """(shard tokens, query heads, KV heads) of every call."""
    spans_ns: list[tuple[int, int]]
    """When attention was entered and left, forward and backward, in `time.monotonic_ns`."""
    captured: CapturedCall | None = None
    """What is to keep one call; None where nobody wants one."""

    def __init__(self) -> None:
        self.is_inside = False
        self.shapes = set()
        self.spans_ns = []
        self.errors = KeptErrors()
        self._entered_ns = 0

    def run(
        self,
        attention: Attention,
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        documents: Documents | None = None,
    ) -> Tensor:
        """Attention's output. The identity before and after it reports when backward enters and leaves."""
        with self.errors:
            self.shapes.add((q_BNSD.shape[2], q_BNSD.shape[1], k_BKSD.shape[1]))
        captured = self.captured if self.captured is not None and self.captured.wants(q_BNSD) else None
        if captured is not None:
            captured.documents = documents

        def keep(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
            if captured is not None:
                with self.errors:
                    captured.keep(**dict(zip(names, tensors, strict=True)))

        def left(*gradients: Tensor | None) -> None:
            self._leave()
            keep(("dq", "dk", "dv"), gradients)

        def entered(*gradients: Tensor | None) -> None:
            keep(("dout",), gradients)
            self._enter()

        q, k, v = self._marked(left, q_BNSD, k_BKSD, v_BKSD)
        self._enter()
        out = attention(q, k, v)
        self._leave()
        keep(("q", "k", "v", "out"), (q, k, v, out))
        return self._marked(entered, out)[0]

    def _marked(self, callback: Callable[..., None], *tensors: Tensor) -> tuple[Tensor, ...]:
        """The same tensors, whose backward calls back."""
        with self.errors:
            marked: tuple[Tensor, ...] = _Report.apply(callback, *tensors)  # type: ignore[no-untyped-call]
            return marked
        return tensors

    def _enter(self) -> None:
        with self.errors:
            self.is_inside = True
            self._entered_ns = time.monotonic_ns()

    def _leave(self) -> None:
        with self.errors:
            if self.is_inside:
                self.spans_ns.append((self._entered_ns, time.monotonic_ns()))
            self.is_inside = False


class _Report(torch.autograd.Function):
    """The identity, whose backward calls back."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[..., None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.callback(*grads)
        return None, *grads
