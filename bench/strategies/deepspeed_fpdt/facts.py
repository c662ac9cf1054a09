"""DeepSpeed's FPDT (arXiv:2408.16978) without its offload: Ulysses, a chunk of the sequence after another."""

from __future__ import annotations

from bench.config import ModelConfig, RunConfig
from bench.strategies.deepspeed_ulysses.facts import DeepSpeedUlysses
from bench.strategies.facts import NOT_ASKED, head_exchange_refusals
from bench.strategies.options import WholeNumber
from bench.strategies.schedule import Schedule, Stage, whole_block
from bench.strategies.ulysses.facts import Ulysses, exchange_heads


def four_chunks(sp_degree: int, model: ModelConfig) -> int:  # noqa: ARG001  the same for all
    """So few that short sequences can be cut; the package's own default is a chunk of 65,536 tokens."""
    return 4


class DeepSpeedFPDT(Ulysses):
    """Of each chunk of a sequence a rank holds a piece: its tokens are contiguous in each chunk only.

    The operation projects its input to Q, K and V itself. Here they are projected already, as models
    norm and rotate them in between, so it is given a matrix of ones and zeros: its time holds that product,
    forward and backward.
    """

    name = "deepspeed_fpdt"
    packs = False
    packing_is = NOT_ASKED
    why_it_packs_not = "DeepSpeed's operation takes no boundaries of documents"
    why_no_full_mask = "DeepSpeed's operation has no `causal` argument and is always causal"
    package = DeepSpeedUlysses.package
    # It merges chunks in float32 whatever the inputs are.
    dtypes = ("bf16", "fp16", "fp32")
    kept_copies = (2, 2)
    options = {"chunks": WholeNumber(auto=four_chunks)}  # noqa: RUF012  a class's own constant, as in torch_cp

    def counterpart(self, cell: RunConfig) -> str | None:  # noqa: ARG002
        return "ulysses"

    def causal_masks(self, layout: str) -> tuple[bool, ...]:  # noqa: ARG002
        """No chunk sees a later one."""
        return (True,)

    def length_multiple(self, cell: RunConfig) -> int:
        return cell.sp_degree * cell.number("chunks")

    def slices(self, cell: RunConfig, seq_len: int, group_rank: int) -> tuple[slice, ...]:
        """A piece of each chunk, as the package's `FPDT_InputConstruct` deals tokens out."""
        pieces = self.length_multiple(cell)
        ends = [seq_len * piece // pieces for piece in range(pieces + 1)]
        return tuple(
            slice(ends[piece], ends[piece + 1]) for piece in range(group_rank, pieces, cell.sp_degree)
        )

    def head_refusals(self, cell: RunConfig) -> list[str]:
        return head_exchange_refusals(cell, repeats=False)

    def schedule(self, cell: RunConfig) -> Schedule:
        """The bytes of `ulysses`, in four all-to-alls a chunk."""
        heads, kv_heads = cell.model.num_heads, cell.model.num_kv_heads
        attention = Stage((whole_block(cell, heads // cell.ulysses_degree, kv_heads // cell.ulysses_degree),))
        q, kv = exchange_heads(cell, heads), exchange_heads(cell, kv_heads)
        return Schedule(forward=(q, kv, kv, attention, q), backward=(q, attention, kv, kv, q))
