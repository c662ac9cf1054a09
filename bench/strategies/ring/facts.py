"""Facts of the built-in ring, which passes on K and V, and sums of their gradients in float32 or wider."""

from __future__ import annotations

from typing import ClassVar

from bench.config import Cell
from bench.strategies.facts import ScheduledFacts, sent_kv_heads
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import (
    Block,
    Communication,
    Schedule,
    Stage,
    Stages,
    ring_blocks,
    tensor_bytes,
    wide_bytes,
)


class RingFacts(ScheduledFacts):
    name = "ring"
    style = PlotStyle("#D55E00", "^", "--")
    supports_documents = True
    layouts: ClassVar[tuple[str, ...]] = ("zigzag", "contiguous", "striped")
    keeps_local_gradients: ClassVar[bool] = True
    """Whether a rank keeps the gradients that it computes for its own K and V.

    Sums of gradients then make P-1 hops instead of P.
    """

    def schedule(self, cell: Cell) -> Schedule:
        """Return P-1 hops of K and V in forward and in backward, and P-1 or P hops of their gradients.

        Gradients are sent in float32, or in float64 for float64. Source: arXiv:2310.01889, section 3.
        """
        heads = cell.model.num_heads // cell.ulysses_degree
        kv_heads = sent_kv_heads(cell) // cell.ulysses_degree
        blocks = ring_blocks(cell, heads, kv_heads)
        kv_bytes = tensor_bytes(cell, 2 * kv_heads, cell.padded_len // cell.ring_degree)
        kv = self.hop(cell, kv_bytes)
        return Schedule(
            forward=_forward(cell, blocks, kv),
            backward=self._backward(cell, blocks, kv),
        )

    def hop(self, cell: Cell, sent_bytes: int) -> Communication:
        """Return the send of `sent_bytes` to the next rank of the ring."""
        return Communication("send", sent_bytes, cell.ring_degree, stride=cell.ring_stride)

    def _backward(self, cell: Cell, blocks: list[Block], kv: Communication) -> Stages:
        """Return stages that compute a block while the next keys and the previous block's gradients are sent.

        No computation hides the last hop of the gradients.
        """
        last, first_hop = len(blocks) - 1, 1 + int(self.keeps_local_gradients)
        dkv = self.hop(cell, wide_bytes(cell, kv.sent_bytes))

        def merged_bytes(ring_step: int, block: Block) -> int:
            gradients = tensor_bytes(cell, 2 * block.kv_heads, block.keys)
            local_gradients = kv.sent_bytes if self.keeps_local_gradients and ring_step else 0
            return wide_bytes(
                cell, tensor_bytes(cell, block.heads, block.queries) + gradients + local_gradients
            )

        stages = [
            Stage(
                (block,),
                ((kv,) if ring_step < last else ()) + ((dkv,) if ring_step >= first_hop else ()),
                is_hidden=True,
                merged_bytes=merged_bytes(ring_step, block),
            )
            for ring_step, block in enumerate(blocks)
        ]
        return (*stages, Stage(communications=(dkv,))) if last else tuple(stages)


def _forward(cell: Cell, blocks: list[Block], kv: Communication) -> Stages:
    """Return stages that compute a block while the next keys arrive; each later block is merged."""
    last = len(blocks) - 1
    return tuple(
        Stage(
            (block,),
            (kv,) if ring_step < last else (),
            is_hidden=True,
            packed_bytes=0 if ring_step else kv.sent_bytes,
            merged_bytes=wide_bytes(cell, tensor_bytes(cell, block.heads, block.queries)) if ring_step else 0,
        )
        for ring_step, block in enumerate(blocks)
    )
