"""Gradients of single keys and values in float64: sums over every query that sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Keys:
    """Some keys of one head and all queries of it that a rank holds."""

    q: Tensor
    """[B, S, D], as `out` and `dout`."""
    out: Tensor
    dout: Tensor
    lse: Tensor
    """Of the queries over all keys that they see, [B, S]."""
    k: Tensor
    """[B, keys, D], as `v`."""
    v: Tensor
    hidden: Tensor
    """Which keys a query may not see, [S, keys] or [B, S, keys]."""
    scale: float
    """Of the scores."""

    def exact(self) -> tuple[Tensor, Tensor]:
        """These queries' part of dk and dv in float64, [2, B, keys, D], and its terms' squares, [2, B, keys].

        dv = sum_i P_i dO_i and dk = scale sum_i P_i (dP_i - (dO_i . O_i)) Q_i.
        """
        return self._summed(torch.float64, torch.float64)

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """The same dk and dv as a sound kernel has them: products of this dtype, sums in at least float32.

        Weights and their gradients are rounded before each product, as flash attention does
        (arXiv:2205.14135, appendix B.2).
        """
        return self._summed(dtype, torch.promote_types(dtype, torch.float32))[0]

    def _summed(self, dtype: torch.dtype, wide: torch.dtype) -> tuple[Tensor, Tensor]:
        q, out, dout, lse, k, v = (
            x.to(wide) for x in (self.q, self.out, self.dout, self.lse, self.k, self.v)
        )
        scores_BSR = q @ k.transpose(1, 2) * self.scale
        probs_BSR = (scores_BSR - lse[..., None]).exp().masked_fill(self.hidden, 0.0)
        delta = (dout * out).sum(dim=-1, keepdim=True)
        dscores_BSR = probs_BSR * (dout @ v.transpose(1, 2) - delta)
        weights = torch.stack([dscores_BSR, probs_BSR]).to(dtype).to(wide).transpose(2, 3)
        factors = torch.stack([q * self.scale, dout])
        terms = weights.square() @ factors.square().sum(dim=-1, keepdim=True)
        return weights @ factors, terms[..., 0]
