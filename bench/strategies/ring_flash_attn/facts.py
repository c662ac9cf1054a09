"""Facts of ring-flash-attn, which sends gradients of K and V one hop more than `ring`."""

from __future__ import annotations

from bench.attention.kernel_facts import FLASH_ATTN, HALF
from bench.config import Cell
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ring.facts import RingFacts


class RingFlashAttnFacts(RingFacts):
    name = "ring_flash_attn"
    style = PlotStyle("#E69F00", "P", "--")
    supports_documents = False
    keeps_local_gradients = False
    no_documents_reason = (
        "its varlen rings need document lengths that are multiples of sp_degree, or of twice that in zigzag,"
        " and shard every document by itself"
    )
    package = "ring-flash-attn"
    flash_attn_kernels = (FLASH_ATTN,)
    dtypes = HALF

    def refusals(self, cell: Cell) -> list[str]:
        return [*super().refusals(cell), *rounding_refusals(cell)]

    def causal_masks(self, layout: str) -> tuple[bool, ...]:
        """Return both masks for the contiguous ring; the package's other rings are always causal."""
        return (True, False) if layout == "contiguous" else (True,)

    def degree_refusals(self, cell: Cell) -> list[str]:
        """Return the reasons against the degree, such as a ring of one rank; gloo cannot send to itself."""
        if cell.sp_degree == 1 and cell.cluster.backend == "gloo":
            return ["sp_degree=1 is not for ring_flash_attn on gloo; take strategy=local"]
        return super().degree_refusals(cell)


def rounding_refusals(cell: Cell) -> list[str]:
    """Return the reasons against fp16 in the contiguous ring, which rounds the gradient of Q to bf16."""
    if cell.layout != "contiguous" or cell.dtype != "fp16":
        return []
    refused_by = f"{cell.strategy} in contiguous layout"
    return [f"dtype=fp16 is not for {refused_by}, which rounds dq to bf16; take dtype=bf16, or layout=zigzag"]
