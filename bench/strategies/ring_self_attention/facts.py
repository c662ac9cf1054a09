"""Our Ring Self-Attention: keys go round the ring, then values; it keeps all that softmax returned."""

from __future__ import annotations

from typing import ClassVar

from bench.config import DTYPE_BYTES, RunConfig
from bench.strategies.facts import ScheduledFacts, activation_bytes
from bench.strategies.schedule import WIDE_BYTES, Exchange, Schedule, Stage, Stages, ring_blocks, wide


class RingSelfAttention(ScheduledFacts):
    name = "ring_self_attention"
    packs = True
    layouts: ClassVar[tuple[str, ...]] = ("zigzag", "contiguous", "striped")
    # It calls none: its scores are in memory at once, as that kernel's.
    kernels = ("math",)
    is_unfused = True

    def counterpart(self, cell: RunConfig) -> str | None:  # noqa: ARG002
        return "ring"

    def kept_bytes_per_token(self, cell: RunConfig) -> int:
        """The probabilities of all keys, and no LSE."""
        number_bytes = DTYPE_BYTES[cell.dtype]
        return cell.model.num_heads * (cell.padded_len * number_bytes - max(WIDE_BYTES, number_bytes))

    def scores_bytes(self, cell: RunConfig) -> int:
        """In forward, of which softmax makes probabilities; backward has those of a block."""
        rows = cell.batch * cell.model.num_heads * cell.shard_len
        return rows * cell.padded_len * DTYPE_BYTES[cell.dtype]

    def schedule(self, cell: RunConfig) -> Schedule:
        """K and V make P-1 hops each in forward and again in backward; so do their gradients, summed.

        Those travel in float32, float64 for float64. arXiv:2105.13120, section 3.2: P-1 hops of each, and a
        reduce-scatter of each gradient.
        """
        heads, kv_heads = cell.model.num_heads, cell.model.num_kv_heads
        kv_bytes = activation_bytes(cell, 2 * kv_heads)
        kv, dkv = (Exchange("send", size, cell.sp_degree) for size in (kv_bytes, wide(cell, kv_bytes)))
        last = cell.sp_degree - 1
        blocks = ring_blocks(cell, heads, kv_heads)
        forward = tuple(
            Stage((block,), (kv,) if step < last else (), is_hidden=True) for step, block in enumerate(blocks)
        )
        backward = tuple(
            Stage(
                (block,),
                ((kv,) if step < last else ()) + ((dkv,) if step > 1 else ()),
                is_hidden=True,
                merged_bytes=wide(cell, activation_bytes(cell, heads + 2 * kv_heads)),
            )
            for step, block in enumerate(blocks)
        )
        home: Stages = (Stage(exchanges=(dkv,)),) if last else ()
        return Schedule(forward, (*backward, *home))
