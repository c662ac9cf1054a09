"""ring-flash-attn's other algorithm, that of Llama 3: all keys of a few heads are gathered at a time."""

from __future__ import annotations

from bench.attention.kernel_facts import HALF
from bench.config import Cell
from bench.strategies.facts import ScheduledFacts
from bench.strategies.options import WholeNumber
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Block, Communication, Schedule, Stage, tensor_bytes


class RingFlashAttnLlama3Facts(ScheduledFacts):
    name = "ring_flash_attn_llama3"
    style = PlotStyle("#CC79A7", "p", ":")
    packs = True
    package = "ring-flash-attn"
    dtypes = HALF
    # As the package's README has it: least memory, most overlap; more heads at a time are fewer launches.
    options = {"heads_k_stride": WholeNumber(auto=lambda _: 1)}  # noqa: RUF012  the package's own word

    def head_refusals(self, cell: Cell) -> list[str]:
        heads, kv_heads = cell.number("heads_k_stride"), cell.model.num_kv_heads
        if kv_heads % heads == 0:
            return []
        divisors = [str(each) for each in range(1, kv_heads + 1) if kv_heads % each == 0]
        way_out = f"choose {' or '.join(divisors)}"
        return [f"strategy.heads_k_stride={heads} must divide the {kv_heads} KV heads; {way_out}"]

    def schedule(self, cell: Cell) -> Schedule:
        """K and V are gathered in forward and in backward, their gradients reduced and scattered.

        So many KV heads at a time; the next are gathered while these are computed. An all-gather hands a
        shard to P-1 ranks, a reduce-scatter hands P-1 shards over once (arXiv:2407.21783, section 3.3.2);
        gradients travel in the cell's dtype.
        """
        kv_heads, ranks = cell.number("heads_k_stride"), cell.sp_degree
        rounds = -(-cell.model.num_kv_heads // kv_heads)  # none would be left of a number that is refused
        sent_bytes = tensor_bytes(cell, 2 * kv_heads, cell.shard_len) * (ranks - 1)
        gathered, reduced = (
            Communication(kind, sent_bytes, ranks) for kind in ("all_gather", "reduce_scatter")
        )
        heads = cell.model.num_heads // rounds
        is_causal = cell.workload.mask == "causal"
        block = Block(cell.batch, heads, kv_heads, cell.shard_len, cell.padded_len, is_causal)
        hidden = Stage((block,), (gathered,), is_hidden=True)
        first, last = Stage(communications=(gathered,)), Stage((block,))
        computed = (hidden,) * (rounds - 1) + (last,)
        home = Stage(communications=(reduced,))
        backward = (part for stage in computed for part in (stage, home))
        return Schedule(forward=(first, *computed), backward=(first, *backward))
