"""Facts of the built-in Ring Self-Attention, which passes on keys, then values, and saves probabilities."""

from __future__ import annotations

from dataclasses import replace

from bench.config import DTYPE_BYTES, Cell
from bench.strategies.facts import activation_bytes
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ring.facts import RingFacts
from bench.strategies.schedule import WIDE_NUMBER_BYTES, Schedule, wide_bytes


class RingSelfAttentionFacts(RingFacts):
    name = "ring_self_attention"
    style = PlotStyle("#999933", ">", "--")
    # It calls no kernel. Its cells have `kernel=math`, because `math` also holds scores in memory.
    kernels = ("math",)
    is_unfused = True

    def saved_bytes_per_token(self, cell: Cell) -> int:
        """Return the bytes of a token's probabilities over all keys, less those of the LSE.

        The caller counts an LSE for every strategy, and this one saves none.
        """
        number_bytes = DTYPE_BYTES[cell.dtype]
        return cell.model.num_heads * (cell.padded_len * number_bytes - max(WIDE_NUMBER_BYTES, number_bytes))

    def scores_bytes(self, cell: Cell) -> int:
        """Return the bytes of the scores of a rank's queries and all keys, which forward holds at once.

        Backward needs less memory for scores, because it computes block by block.
        """
        rows = cell.batch * cell.model.num_heads * cell.shard_len
        return rows * cell.padded_len * DTYPE_BYTES[cell.dtype]

    def schedule(self, cell: Cell) -> Schedule:
        """Return the hops of `ring`: P-1 of K and V in forward and in backward, and P-1 of their gradients.

        Unlike in `ring`, forward merges no partial results. Backward adds the gradients of Q, K and V at
        every block, in float32 or wider. Source: arXiv:2105.13120, section 3.2.
        """
        ring, model = super().schedule(cell), cell.model
        merged = wide_bytes(cell, activation_bytes(cell, model.num_heads + 2 * model.num_kv_heads))
        return Schedule(
            forward=tuple(replace(stage, packed_bytes=0, merged_bytes=0) for stage in ring.forward),
            backward=tuple(
                replace(stage, merged_bytes=merged if stage.blocks else 0) for stage in ring.backward
            ),
        )
