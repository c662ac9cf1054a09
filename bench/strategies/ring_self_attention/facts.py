"""Our Ring Self-Attention: keys go round the ring, then values; it keeps all that softmax returned."""

from __future__ import annotations

from dataclasses import replace

from bench.config import DTYPE_BYTES, Cell
from bench.strategies.facts import activation_bytes
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ring.facts import RingFacts
from bench.strategies.schedule import WIDE_BYTES, Schedule, wide


class RingSelfAttentionFacts(RingFacts):
    name = "ring_self_attention"
    style = PlotStyle("#999933", ">", "--")
    # It calls none: its scores are in memory at once, as that kernel's.
    kernels = ("math",)
    is_unfused = True

    def kept_bytes_per_token(self, cell: Cell) -> int:
        """The probabilities of all keys, and no LSE."""
        number_bytes = DTYPE_BYTES[cell.dtype]
        return cell.model.num_heads * (cell.padded_len * number_bytes - max(WIDE_BYTES, number_bytes))

    def scores_bytes(self, cell: Cell) -> int:
        """In forward, of which softmax makes probabilities; backward has those of a block."""
        rows = cell.batch * cell.model.num_heads * cell.shard_len
        return rows * cell.padded_len * DTYPE_BYTES[cell.dtype]

    def schedule(self, cell: Cell) -> Schedule:
        """The hops of `ring`: P-1 of K and V in forward and again in backward, as many of their gradients.

        arXiv:2105.13120, section 3.2: P-1 hops of each, and a reduce-scatter of each gradient. Nothing is
        merged in forward; in backward gradients of all that a rank holds are added up, wide, at every block.
        """
        ring, model = super().schedule(cell), cell.model
        merged = wide(cell, activation_bytes(cell, model.num_heads + 2 * model.num_kv_heads))
        return Schedule(
            forward=tuple(replace(stage, packed_bytes=0, merged_bytes=0) for stage in ring.forward),
            backward=tuple(
                replace(stage, merged_bytes=merged if stage.blocks else 0) for stage in ring.backward
            ),
        )
