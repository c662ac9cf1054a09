"""Our ring: KV blocks travel round the ring while ranks compute, their gradients follow in wide precision."""

from __future__ import annotations

from typing import ClassVar

from bench.config import Cell
from bench.strategies.facts import ScheduledFacts, exchanged_kv_heads
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import (
    Block,
    Communication,
    Schedule,
    Stage,
    Stages,
    ring_blocks,
    tensor_bytes,
    wide,
)


class RingFacts(ScheduledFacts):
    name = "ring"
    style = PlotStyle("#D55E00", "^", "--")
    packs = True
    layouts: ClassVar[tuple[str, ...]] = ("zigzag", "contiguous", "striped")
    first_gradients_wait: ClassVar[bool] = True
    """Whether what a rank finds for its own keys stays at home: then gradients make P-1 hops, otherwise P."""

    def schedule(self, cell: Cell) -> Schedule:
        """K and V make P-1 hops in forward and again in backward, their gradients as many or one more.

        Gradients travel in float32, float64 for float64. The rotation is that of arXiv:2310.01889, section 3.
        """
        heads = cell.model.num_heads // cell.ulysses_degree
        kv_heads = exchanged_kv_heads(cell) // cell.ulysses_degree
        blocks = ring_blocks(cell, heads, kv_heads)
        kv_bytes = tensor_bytes(cell, 2 * kv_heads, cell.padded_len // cell.ring_degree)
        kv = self.hop(cell, kv_bytes)
        return Schedule(
            forward=_forward(cell, blocks, kv),
            backward=self._backward(cell, blocks, kv),
        )

    def hop(self, cell: Cell, sent_bytes: int) -> Communication:
        """One tensor to the next rank of the ring."""
        return Communication("send", sent_bytes, cell.ring_degree, stride=cell.ring_stride)

    def _backward(self, cell: Cell, blocks: list[Block], kv: Communication) -> Stages:
        """Behind each block the next keys and the gradients of the last ones; the last hop home is bare."""
        last, waits = len(blocks) - 1, int(self.first_gradients_wait)
        dkv = self.hop(cell, wide(cell, kv.sent_bytes))

        def merged_bytes(ring_step: int, block: Block) -> int:
            gradients = tensor_bytes(cell, 2 * block.kv_heads, block.keys)
            waiting = kv.sent_bytes if waits and ring_step else 0
            return wide(cell, tensor_bytes(cell, block.heads, block.queries) + gradients + waiting)

        stages = [
            Stage(
                (block,),
                ((kv,) if ring_step < last else ()) + ((dkv,) if ring_step > waits else ()),
                is_hidden=True,
                merged_bytes=merged_bytes(ring_step, block),
            )
            for ring_step, block in enumerate(blocks)
        ]
        return (*stages, Stage(communications=(dkv,))) if last else tuple(stages)


def _forward(cell: Cell, blocks: list[Block], kv: Communication) -> Stages:
    """The next rank's keys arrive behind each block but the last; each but the first is merged."""
    last = len(blocks) - 1
    return tuple(
        Stage(
            (block,),
            (kv,) if ring_step < last else (),
            is_hidden=True,
            packed_bytes=0 if ring_step else kv.sent_bytes,
            merged_bytes=wide(cell, tensor_bytes(cell, block.heads, block.queries)) if ring_step else 0,
        )
        for ring_step, block in enumerate(blocks)
    )
