"""One call of attention as a rank saw it, kept outside of what counts as tensor memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from bench.attention.documents import Documents

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """The same memory as integers: numpy has no bf16, and other bits are other integers."""
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
