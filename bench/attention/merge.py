"""Two partial attentions over disjoint keys as one, exactly, by their LSE."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Partial:
    """Attention over the keys seen so far, `out` [B, N, S, D] and `lse` [B, N, S], kept wide.

    Wide is float64 for float64 inputs and float32 for all others: merged in bf16, errors would grow with
    every ring step.
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def first(cls, out: Tensor, lse: Tensor) -> Partial:
        """Start from attention over a first block that every query sees a key of."""
        wide = torch.promote_types(out.dtype, torch.float32)
        return cls(out.to(wide), lse.to(wide).contiguous())

    @classmethod
    def nothing(cls, q: Tensor) -> Partial:
        """Start from no keys at all: what is merged first into a row is all of it."""
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=wide, device=q.device)
        return cls(out, torch.full(q.shape[:-1], -torch.inf, dtype=wide, device=q.device))

    def of(self, sequences: slice) -> Partial:
        """A view of some sequences of the batch: what is merged into it is merged into this one."""
        return self if sequences == slice(None) else Partial(self.out[sequences], self.lse[sequences])

    def merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Add attention of the queries `rows` over another block of keys, in place.

        With l = log(e^l1 + e^l2), the merged output is e^(l1-l) out1 + e^(l2-l) out2 (arXiv:2310.01889,
        section 3); written as a step from out1 towards out2 it needs one weight.
        """
        merged, merged_lse = self.out[:, :, rows], self.lse[:, :, rows]
        lse = lse.to(self.lse.dtype)
        weight = torch.sigmoid(lse - merged_lse)[..., None]
        merged.lerp_(out.to(self.out.dtype), weight)
        torch.logaddexp(merged_lse, lse, out=merged_lse)
