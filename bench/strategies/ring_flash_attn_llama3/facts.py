"""Facts of the Llama 3 algorithm of ring-flash-attn, which gathers all keys of a few heads at a time."""

from __future__ import annotations

from bench.attention.kernel_facts import FLASH_ATTN, HALF
from bench.config import Cell
from bench.strategies.facts import ScheduledFacts
from bench.strategies.options import WholeNumber
from bench.strategies.plot_style import PlotStyle
from bench.strategies.schedule import Block, Communication, Schedule, Stage, tensor_bytes


class RingFlashAttnLlama3Facts(ScheduledFacts):
    name = "ring_flash_attn_llama3"
    style = PlotStyle("#CC79A7", "p", ":")
    supports_documents = True
    package = "ring-flash-attn"
    flash_attn_kernels = (FLASH_ATTN,)
    dtypes = HALF
    # One head at a time, as in the package's README, needs least memory and hides most communication. More
    # heads at a time need fewer kernel calls.
    options = {"heads_k_stride": WholeNumber(auto=lambda _: 1)}  # noqa: RUF012  the package's word

    def head_refusals(self, cell: Cell) -> list[str]:
        heads, kv_heads = cell.number("heads_k_stride"), cell.model.num_kv_heads
        if kv_heads % heads == 0:
            return []
        divisors = [str(number) for number in range(1, kv_heads + 1) if kv_heads % number == 0]
        way_out = f"choose {' or '.join(divisors)}"
        return [f"strategy.heads_k_stride={heads} must divide the {kv_heads} KV heads; {way_out}"]

    def schedule(self, cell: Cell) -> Schedule:
        """Return all-gathers of K and V in forward and backward, and reduce-scatters of their gradients.

        A stage computes `heads_k_stride` KV heads while the next `heads_k_stride` heads are gathered. An
        all-gather sends one shard to each of P-1 ranks, a reduce-scatter sends P-1 shards to one rank each
        (arXiv:2407.21783, section 3.3.2).
        Gradients are sent in the cell's dtype.
        """
        kv_heads, ranks = cell.number("heads_k_stride"), cell.sp_degree
        rounds = -(-cell.model.num_kv_heads // kv_heads)  # rounded up, so that a refused number gives no zero
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
        scatter = Stage(communications=(reduced,))
        backward = (part for stage in computed for part in (stage, scatter))
        return Schedule(forward=(first, *computed), backward=(first, *backward))
