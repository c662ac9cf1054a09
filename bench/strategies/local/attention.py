"""Attention on one rank: the base every strategy is compared with."""

from __future__ import annotations

from torch import Tensor

from bench.attention.kernels import attend
from bench.attention.strategy import Strategy


class LocalAttention(Strategy):
    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        return attend(q_BNSD, k_BKSD, v_BKSD, kernel=self.kernel, causal=causal)


STRATEGY = LocalAttention
