"""Observer of attention inside a model: when it runs, with which shapes, and a copy of one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bench.common.deferred_errors import DeferredErrors

_INTEGER_BY_SIZE = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """Return a view of the tensor's memory as integers, because numpy has no bf16."""
    return tensor.view(_INTEGER_BY_SIZE[tensor.element_size()])


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Copy of a tensor in a numpy array. Tools that count the memory of tensors do not see the array."""

    bits: np.ndarray
    """The tensor's elements as integers, because numpy has no bf16."""
    dtype: torch.dtype

    @classmethod
    def from_tensor(cls, tensor: Tensor) -> HostCopy:
        bits = bits_of(tensor.detach().cpu())
        return cls(np.array(bits.numpy()), tensor.dtype)

    def to_tensor(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self.bits).view(self.dtype).to(device)


@dataclass(slots=True)
class CapturedCall:
    """Copy of one attention call that trains: q, k, v, out and their gradients, [B, heads, S, D].

    It is empty until the call has run.
    """

    number: int = 0
    """Number of the copied call, counted from 0 over the calls that train."""
    calls: int = 0
    """Number of calls that have trained so far."""
    copy_context: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context entered while tensors are copied, so that the copies do not count as a part of the step."""
    copies: dict[str, HostCopy] = field(default_factory=dict)
    """Copied tensors by name: q, k, v, out, dq, dk, dv, dout and, if given, position_ids [1 or B, S]."""

    def count_call(self, q: Tensor) -> bool:
        """Count the call with these queries if it trains, and return whether it is the one to copy."""
        if not (torch.is_grad_enabled() and q.requires_grad):
            return False
        self.calls += 1
        return self.calls == self.number + 1

    def keep(self, **tensors: Tensor | None) -> None:
        """Copy tensors of the call by name; None for a tensor without a gradient."""
        with self.copy_context():
            self.copies |= {name: HostCopy.from_tensor(x) for name, x in tensors.items() if x is not None}

    @property
    def is_whole(self) -> bool:
        """Whether forward and backward of the call have been copied."""
        return {"q", "k", "v", "out", "dq", "dk", "dv", "dout"} <= self.copies.keys()

    def tensors_on(self, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors by name, [B, heads, S, D]. An output [B, S, heads, D] is transposed."""
        tensors = {name: copy.to_tensor(device) for name, copy in self.copies.items()}
        for name in ("out", "dout"):
            if tensors[name].shape != tensors["q"].shape:
                tensors[name] = tensors[name].transpose(1, 2)
        return tensors


Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class AttentionWatch:
    """Observer of a model's attention calls."""

    is_inside: bool
    """Whether attention runs now, in forward or backward."""
    shapes: set[tuple[int, int, int]]
    """Distinct (shard tokens, query heads, KV heads) of the calls."""
    spans_ns: list[tuple[int, int]]
    """(start, end) of each forward and backward of attention on the host, in `time.monotonic_ns`."""
    captured: CapturedCall | None = None
    """Copy to fill with one of the next calls; None for no copy."""
    errors: DeferredErrors
    """First error of the watch itself. It is stored, so that attention and the step go on."""

    def __init__(self) -> None:
        self.is_inside = False
        self.shapes = set()
        self.spans_ns = []
        self.errors = DeferredErrors()
        self._entered_ns = 0

    def run(
        self,
        attention: Attention,
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        position_ids: Tensor | None = None,
    ) -> Tensor:
        """Run attention and record the call.

        Identity functions before and after attention report when backward enters and leaves it.

        Args:
            attention: Function of q, k and v, whose output is returned.
            q_BNSD: Queries. B batch, S tokens of a shard, D head size, N query heads; K is the KV heads.
            k_BKSD: Keys.
            v_BKSD: Values.
            position_ids: Positions of this rank's tokens, which restart in each packed document.
        """
        with self.errors:
            self.shapes.add((q_BNSD.shape[2], q_BNSD.shape[1], k_BKSD.shape[1]))
        captured = self.captured if self.captured is not None and self.captured.count_call(q_BNSD) else None

        def keep(names: Sequence[str], tensors: Sequence[Tensor | None]) -> None:
            if captured is not None:
                with self.errors:
                    captured.keep(**dict(zip(names, tensors, strict=True)))

        def leave_backward(*gradients: Tensor | None) -> None:
            self._leave()
            keep(("dq", "dk", "dv"), gradients)

        def enter_backward(*gradients: Tensor | None) -> None:
            keep(("dout",), gradients)
            self._enter()

        q, k, v = self._call_in_backward(leave_backward, q_BNSD, k_BKSD, v_BKSD)
        self._enter()
        out = attention(q, k, v)
        self._leave()
        keep(("q", "k", "v", "out", "position_ids"), (q, k, v, out, position_ids))
        return self._call_in_backward(enter_backward, out)[0]

    def _call_in_backward(self, callback: Callable[..., None], *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return the tensors unchanged, with `callback` called on their gradients in backward."""
        with self.errors:
            outputs: tuple[Tensor, ...] = _Report.apply(callback, *tensors)  # type: ignore[no-untyped-call]
            return outputs
        return tensors  # after a stored error

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
    """Identity function that calls a callback with the gradients in backward."""

    @staticmethod
    def forward(ctx: Any, callback: Callable[..., None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.callback = callback
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.callback(*grads)
        return None, *grads
