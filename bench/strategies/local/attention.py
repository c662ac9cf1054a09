"""Attention on one rank, the reference of every strategy."""

from __future__ import annotations

from torch import Tensor

from bench.attention.kernels import kernel_forward
from bench.attention.packed import packed_lse
from bench.strategies.strategy import Strategy


class LocalAttention(Strategy):
    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        return self.attend_whole(q_BNSD, k_BKSD, v_BKSD, causal=causal)

    def log_sum_exp(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        if self.packing is not None:
            return packed_lse(q_BNSD, k_BKSD, v_BKSD, kernel=self.kernel, packing=self.packing)
        scale = q_BNSD.shape[-1] ** -0.5
        return kernel_forward(self.kernel, q_BNSD, k_BKSD, v_BKSD, causal=causal, scale=scale)[1]


STRATEGY = LocalAttention
