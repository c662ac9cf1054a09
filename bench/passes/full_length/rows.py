"""Single rows of attention in float64: output and query gradient of some tokens of a long sequence."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Rows:
    """Some queries of one head and all keys they may see."""

    q: Tensor
    """[B, rows, D], as `dout`."""
    k: Tensor
    """[B, T, D], as `v`."""
    v: Tensor
    dout: Tensor
    hidden: Tensor
    """Which keys a row may not see, [rows, T] or [B, rows, T]."""
    scale: float
    """Of the scores."""

    def exact(self) -> tuple[Tensor, Tensor]:
        """Output and query gradient in float64: dq = P * (dP - (dout . out)) K * scale."""
        return self._computed(torch.float64, torch.float64)

    def rounded(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The same as a sound kernel computes it: products of this dtype, sums in at least float32.

        Weights and their gradients are rounded before each product, as flash attention does
        (arXiv:2205.14135, appendix B.2).
        """
        return self._computed(dtype, torch.promote_types(dtype, torch.float32))

    def _computed(self, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        def narrow(x: Tensor) -> Tensor:
            return x.to(dtype).to(wide)

        q, k, v, dout = (x.to(wide) for x in (self.q, self.k, self.v, self.dout))
        scores_BRT = (q @ k.transpose(1, 2) * self.scale).masked_fill(self.hidden, float("-inf"))
        probs_BRT = scores_BRT.softmax(dim=-1)
        out_BRD = narrow(narrow(probs_BRT) @ v)
        delta = (dout * out_BRD).sum(dim=-1, keepdim=True)
        dscores_BRT = probs_BRT * (dout @ v.transpose(1, 2) - delta)
        return out_BRD, narrow(narrow(dscores_BRT) @ k * self.scale)
