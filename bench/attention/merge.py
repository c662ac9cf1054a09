"""Exact merge of partial attention results over disjoint keys, by their LSE."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(slots=True)
class Partial:
    """Attention over some of the keys, into which attention over further keys is merged.

    Both tensors are float64 for float64 inputs and float32 for all others. In bf16, rounding errors would
    grow with every merge.

    Args:
        out: Output over the keys merged so far, [B, N, S, D].
        lse: Natural log of the sum of exponentials of the scaled scores of these keys, [B, N, S].
    """

    out: Tensor
    lse: Tensor

    @classmethod
    def first(cls, out: Tensor, lse: Tensor) -> Partial:
        """Return the partial result of a first block of keys, of which every query sees at least one.

        Args:
            out: Output of the kernel, [B, N, S, D].
            lse: LSE of the kernel, [B, N, S].
        """
        dtype = torch.promote_types(out.dtype, torch.float32)
        return cls(out.to(dtype), lse.to(dtype).contiguous())

    @classmethod
    def empty(cls, q: Tensor) -> Partial:
        """Return the partial result over no keys: zeros, and an LSE of minus infinity.

        Args:
            q: Queries [B, N, S, D]. The result has their shape and device.
        """
        dtype = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(q.shape, dtype=dtype, device=q.device)
        return cls(out, torch.full(q.shape[:-1], -torch.inf, dtype=dtype, device=q.device))

    def select_sequences(self, sequences: slice) -> Partial:
        """Return a view of some sequences of the batch. Merging into the view changes this result."""
        return self if sequences == slice(None) else Partial(self.out[sequences], self.lse[sequences])

    def merge(self, rows: slice, out: Tensor, lse: Tensor) -> None:
        """Merge attention of some queries over another block of keys, in place.

        With l = log(e^l1 + e^l2), the merged output is e^(l1-l) out1 + e^(l2-l) out2 (arXiv:2310.01889,
        section 3). Written as an interpolation from out1 to out2 it needs one weight.

        Args:
            rows: Queries that see the block.
            out: Output of these queries over the block, [B, N, rows, D].
            lse: LSE of these queries over the block, [B, N, rows].
        """
        merged, merged_lse = self.out[:, :, rows], self.lse[:, :, rows]
        lse = lse.to(self.lse.dtype)
        weight = torch.sigmoid(lse - merged_lse)[..., None]
        merged.lerp_(out.to(self.out.dtype), weight)
        torch.logaddexp(merged_lse, lse, out=merged_lse)
