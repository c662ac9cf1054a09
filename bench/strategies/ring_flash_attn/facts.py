"""Facts of ring-flash-attn, which sends gradients of K and V one hop more than `ring`."""

from __future__ import annotations

from bench.attention.kernel_facts import HALF
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
    dtypes = HALF

    def refusals(self, cell: Cell) -> list[str]:
        return [*super().refusals(cell), *rounding_refusals(cell)]

    def causal_masks(self, layout: str) -> tuple[bool, ...]:
        """Return causal only for the zigzag and striped rings of the package."""
        return (True, False) if layout == "contiguous" else (True,)

    def degree_refusals(self, cell: Cell) -> list[str]:
        """Return the reasons against the degree; a ring of one sends to itself, which gloo cannot do."""
        if cell.sp_degree == 1 and cell.cluster.backend == "gloo":
            return ["sp_degree=1 is not for ring_flash_attn on gloo; take strategy=local"]
        return super().degree_refusals(cell)


def rounding_refusals(cell: Cell) -> list[str]:
    """Return the reasons against the dtype; the contiguous ring always rounds the gradient of Q to bf16."""
    if cell.layout != "contiguous" or cell.dtype != "fp16":
        return []
    who = f"{cell.strategy} in contiguous layout"
    return [f"dtype=fp16 is not for {who}, which rounds dq to bf16; take dtype=bf16, or layout=zigzag"]
