"""Facts of DeepSpeed's FPDT (arXiv:2408.16978), Ulysses by chunks of the sequence kept in host memory."""

from __future__ import annotations

from bench.attention.kernel_facts import FLASH_ATTN
from bench.config import Cell
from bench.strategies.deepspeed_ulysses.facts import DeepSpeedUlyssesFacts
from bench.strategies.options import Flag, WholeNumber
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ulysses.facts import PackagedUlyssesFacts

CHUNK_TOKENS = 65536
"""Tokens of a chunk by default in the package, `FPDT_Attention.chunk_size`."""
CPU_CHUNKS = 4
"""Number of chunks on CPU ranks, whose sequences are shorter than the package's chunk."""


def default_chunks(cell: Cell) -> int:
    """Return the package's default number of chunks, or `CPU_CHUNKS` on CPU ranks."""
    return CPU_CHUNKS if cell.cluster.device == "cpu" else max(1, cell.seq_len // CHUNK_TOKENS)


def runs_on_gpus(cell: Cell) -> bool:
    """Return whether the ranks run on GPUs, where the package offloads by default."""
    return cell.cluster.device == "cuda"


def offloads(cell: Cell) -> bool:
    """Return whether chunks wait in host memory; a single chunk stays on the GPU, as in `FPDT_Attention`."""
    return cell.flag("offload") and cell.number("chunks") > 1


class DeepSpeedFPDTFacts(PackagedUlyssesFacts):
    """Facts of `deepspeed_fpdt`, which sends the bytes of `ulysses` in four all-to-alls per chunk.

    A rank holds a piece of every chunk, so its tokens are contiguous within a chunk only.

    DeepSpeed's operation projects its input to Q, K and V. Models project, norm and rotate Q, K and V before
    attention, so the adapter passes an identity matrix as the weight. The measured time includes that
    product, in forward and in backward.
    """

    name = "deepspeed_fpdt"
    style = PlotStyle("#117733", "d")
    no_documents_reason = "DeepSpeed's operation does not take document boundaries"
    no_full_mask_reason = "DeepSpeed's operation has no `causal` argument and is always causal"
    package = DeepSpeedUlyssesFacts.package
    flash_attn_kernels = (FLASH_ATTN,)
    # Chunks are always merged in float32, so float64 would not have its precision.
    dtypes = ("bf16", "fp16", "fp32")
    saved_copies = (2, 2)
    options = {  # noqa: RUF012  constant, as in torch_cp
        "chunks": WholeNumber(auto=default_chunks),
        "offload": Flag(default=runs_on_gpus),
    }

    def refusals(self, cell: Cell) -> list[str]:
        is_refused = cell.flag("offload") and cell.cluster.device == "cpu"
        reason = (
            f"strategy.offload=true is not for {self.name} on CPU ranks, as it copies on CUDA streams; take"
            " strategy.offload=false"
        )
        return [*super().refusals(cell), *[reason] * is_refused]

    def saved_bytes_per_token(self, cell: Cell) -> int:
        """Return 0 if chunks wait for backward in host memory; otherwise the size of `saved_copies`."""
        return 0 if offloads(cell) else super().saved_bytes_per_token(cell)

    def causal_masks(self, layout: str) -> tuple[bool, ...]:  # noqa: ARG002
        """Return only the causal mask, as the package computes no other."""
        return (True,)

    def length_multiple(self, cell: Cell) -> int:
        return cell.sp_degree * cell.number("chunks")

    def slices(self, cell: Cell, seq_len: int, group_rank: int) -> tuple[slice, ...]:
        """Return a rank's piece of every chunk, as the package's `FPDT_InputConstruct` distributes tokens."""
        pieces = self.length_multiple(cell)
        ends = [seq_len * piece // pieces for piece in range(pieces + 1)]
        return tuple(
            slice(ends[piece], ends[piece + 1]) for piece in range(group_rank, pieces, cell.sp_degree)
        )
