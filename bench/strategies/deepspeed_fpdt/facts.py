"""DeepSpeed's FPDT (arXiv:2408.16978): Ulysses, a chunk of the sequence after another, kept on the host."""

from __future__ import annotations

from bench.config import Cell
from bench.strategies.deepspeed_ulysses.facts import DeepSpeedUlyssesFacts
from bench.strategies.options import Flag, WholeNumber
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ulysses.facts import PackagedUlyssesFacts

CHUNK_TOKENS = 65536
"""The package's own default, `FPDT_Attention.chunk_size`."""
CPU_CHUNKS = 4
"""Sequences of CPU ranks are shorter than the package's chunk: uncut, they run none of what FPDT adds."""


def chunks_of_package(cell: Cell) -> int:
    """As many as the package cuts; on CPU ranks four."""
    return CPU_CHUNKS if cell.cluster.device == "cpu" else max(1, cell.seq_len // CHUNK_TOKENS)


def on_gpus(cell: Cell) -> bool:
    """The package's own default, which needs CUDA's streams."""
    return cell.cluster.device == "cuda"


def offloads(cell: Cell) -> bool:
    """As `FPDT_Attention` decides: one chunk stays on the GPU."""
    return cell.flag("offload") and cell.number("chunks") > 1


class DeepSpeedFPDTFacts(PackagedUlyssesFacts):
    """Of each chunk of a sequence a rank holds a piece: its tokens are contiguous in each chunk only.

    It sends the bytes of `ulysses`, in four all-to-alls a chunk.

    The operation projects its input to Q, K and V itself. Here they are projected already, as models
    norm and rotate them in between, so it is given a matrix of ones and zeros: its time holds that product,
    forward and backward.
    """

    name = "deepspeed_fpdt"
    style = PlotStyle("#117733", "d")
    why_it_packs_not = "DeepSpeed's operation takes no boundaries of documents"
    why_no_full_mask = "DeepSpeed's operation has no `causal` argument and is always causal"
    package = DeepSpeedUlyssesFacts.package
    # It merges chunks in float32 whatever the inputs are.
    dtypes = ("bf16", "fp16", "fp32")
    kept_copies = (2, 2)
    options = {  # noqa: RUF012  a class's own constant, as in torch_cp
        "chunks": WholeNumber(auto=chunks_of_package),
        "offload": Flag(default=on_gpus),
    }

    def refusals(self, cell: Cell) -> list[str]:
        refused = cell.flag("offload") and cell.cluster.device == "cpu"
        reason = (
            f"strategy.offload=true is not for {self.name} on CPU ranks, as it copies on CUDA's streams; take"
            " strategy.offload=false"
        )
        return [*super().refusals(cell), *[reason] * refused]

    def kept_bytes_per_token(self, cell: Cell) -> int:
        """Nothing where chunks wait for backward in host memory; a single chunk is never moved there."""
        return 0 if offloads(cell) else super().kept_bytes_per_token(cell)

    def causal_masks(self, layout: str) -> tuple[bool, ...]:  # noqa: ARG002
        """No chunk sees a later one."""
        return (True,)

    def length_multiple(self, cell: Cell) -> int:
        return cell.sp_degree * cell.number("chunks")

    def slices(self, cell: Cell, seq_len: int, group_rank: int) -> tuple[slice, ...]:
        """A piece of each chunk, as the package's `FPDT_InputConstruct` deals tokens out."""
        pieces = self.length_multiple(cell)
        ends = [seq_len * piece // pieces for piece in range(pieces + 1)]
        return tuple(
            slice(ends[piece], ends[piece + 1]) for piece in range(group_rank, pieces, cell.sp_degree)
        )
