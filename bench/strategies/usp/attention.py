"""USP: gather the ring shard of some heads, send them round the ring, scatter them back.

Shapes: B batch, S tokens of a rank, R = S x ulysses_degree those of a ring shard, N query heads, M of them,
K KV heads, L of them, D head size.
"""

from __future__ import annotations

from torch import Tensor

from bench.attention.layouts import LAYOUTS
from bench.strategies.ring.attention import RingContext, ring_attention
from bench.strategies.strategy import Strategy
from bench.strategies.ulysses.attention import gather_heads_scatter_seq, gather_seq_scatter_heads


class USPAttention(Strategy):
    def attention(self, q_BNSD: Tensor, k_BKSD: Tensor, v_BKSD: Tensor, *, causal: bool = True) -> Tensor:
        ring = RingContext(self.groups.ring, self.kernel, LAYOUTS[self.cell.layout], causal, self.documents)
        q_BMRD, k_BLRD, v_BLRD = gather_seq_scatter_heads(q_BNSD, k_BKSD, v_BKSD, self.groups.ulysses)
        out_BMRD = ring_attention(q_BMRD, k_BLRD, v_BLRD, ring)
        return gather_heads_scatter_seq(out_BMRD, self.groups.ulysses)


STRATEGY = USPAttention
