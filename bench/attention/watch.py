"""When attention begins and ends inside a model, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.attention.capture import CapturedCall

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
        self._entered_ns = 0

    def run(self, attention: Attention, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor) -> Tensor:
        """Attention's output. The identity before and after it reports when backward enters and leaves."""
        self.shapes.add((q_BNSD.shape[2], q_BNSD.shape[1], k_BKSD.shape[1]))
        captured = self.captured if self.captured is not None and self.captured.wants(q_BNSD) else None

        def left(*gradients: Tensor | None) -> None:
            self._leave()
            if captured is not None:
                captured.keep(**dict(zip(("dq", "dk", "dv"), gradients, strict=True)))

        def entered(*gradients: Tensor | None) -> None:
            if captured is not None:
                captured.keep(dout=gradients[0])
            self._enter()

        q, k, v = _Report.apply(left, q_BNSD, k_BKSD, v_BKSD)  # type: ignore[no-untyped-call]
        self._enter()
        out = attention(q, k, v)
        self._leave()
        if captured is not None:
            captured.keep(q=q, k=k, v=v, out=out)
        marked: Tensor = _Report.apply(entered, out)[0]  # type: ignore[no-untyped-call]
        return marked

    def _enter(self) -> None:
        self.is_inside = True
        self._entered_ns = time.monotonic_ns()

    def _leave(self) -> None:
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
