"""ring-flash-attn's other algorithm, that of Llama 3: all keys of a few heads are gathered at a time."""

from __future__ import annotations

from bench.attention.kernel_facts import HALF, WHY_HALF
from bench.config import RunConfig
from bench.strategies.facts import ScheduledFacts
from bench.strategies.schedule import Block, Exchange, Schedule, Stage, tensor_bytes


class RingFlashAttnLlama3(ScheduledFacts):
    name = "ring_flash_attn_llama3"
    packs = True
    package = "ring-flash-attn"
    dtypes, why_these_dtypes = HALF, WHY_HALF

    def counterpart(self, cell: RunConfig) -> str | None:  # noqa: ARG002
        return "gather_kv"

    def schedule(self, cell: RunConfig) -> Schedule:
        """K and V are gathered in forward and in backward, their gradients reduced and scattered.

        One KV head at a time; the next is gathered while one is computed. An all-gather hands a shard to P-1
        ranks, a reduce-scatter hands P-1 shards over once (arXiv:2407.21783, section 3.3.2); gradients
        travel in the cell's dtype.
        """
        kv_heads, ranks = cell.model.num_kv_heads, cell.sp_degree
        head_bytes = tensor_bytes(cell, 2, cell.shard_len) * (ranks - 1)
        gathered, reduced = (Exchange(kind, head_bytes, ranks) for kind in ("all_gather", "reduce_scatter"))
        heads = cell.model.num_heads // kv_heads
        is_causal = cell.workload.mask == "causal"
        block = Block(cell.batch, heads, 1, cell.shard_len, cell.padded_len, is_causal)
        hidden = Stage((block,), (gathered,), is_hidden=True)
        first, last = Stage(exchanges=(gathered,)), Stage((block,))
        computed = (hidden,) * (kv_heads - 1) + (last,)
        home = Stage(exchanges=(reduced,))
        backward = (part for stage in computed for part in (stage, home))
        return Schedule(forward=(first, *computed), backward=(first, *backward))
