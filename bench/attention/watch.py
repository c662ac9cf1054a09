"""When attention begins and ends inside a model, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.kept_errors import KeptErrors

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class AttentionWatch:
    """Whether attention is running, when it did, and which shapes it was given."""

    is_inside: bool
    shapes: set[tuple[int, int, int]]
    """(shard tokens, query heads, KV heads) of every call."""
    spans_ns: list[tuple[int, int]]
    """When attention was entered and left, forward and backward, in `time.monotonic_ns`."""

    def __init__(self) -> None:
        self.is_inside = False
        self.shapes = set()
        self.spans_ns = []
        self.errors = KeptErrors()
        self._entered_ns = 0

    def run(self, attention: Attention, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
        """Attention's output. The identity before and after it reports when backward enters and leaves."""
        with self.errors:
            self.shapes.add((q_BNSD.shape[2], q_BNSD.shape[1], k_BKSD.shape[1]))
        q, k, v = self._marked(self._leave, q_BNSD, k_BKSD, v_BKSD)
        self._enter()
        out = attention(q, k, v)
        self._leave()
        return self._marked(self._enter, out)[0]

    def _marked(self, callback: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
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
    def forward(ctx: Any, callback: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.callback()
        return None, *grads
