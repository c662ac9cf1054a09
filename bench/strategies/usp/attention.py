"""USP (arXiv:2405.07719), which is ring attention over longer shards of some heads, between two all-to-alls.

The first all-to-all gathers this rank's heads of a ring shard, the shards of `ulysses_degree` ranks. The
second returns all heads of this rank's shard.

Shapes: B batch, S tokens of a shard, R = S x ulysses_degree tokens of a ring shard, N query heads, M of one
rank, K KV heads, L of one rank, D head size.
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
