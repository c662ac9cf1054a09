"""The ring-flash-attn package: K and V are sent apart, and their gradients one hop further than by ours."""

from __future__ import annotations

from bench.attention.kernel_facts import HALF
from bench.config import Cell
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ring.facts import RingFacts


class RingFlashAttnFacts(RingFacts):
    name = "ring_flash_attn"
    style = PlotStyle("#E69F00", "P", "--")
    packs = False
    first_gradients_wait = False
    why_it_packs_not = (
        "its varlen rings want each document's length to be a multiple of sp_degree, in zigzag of twice that,"
        " and each document laid out by itself"
    )
    package = "ring-flash-attn"
    dtypes = HALF

    def refusals(self, cell: Cell) -> list[str]:
        return [*super().refusals(cell), *rounding_refusals(cell)]

    def causal_masks(self, layout: str) -> tuple[bool, ...]:
        """The package's zigzag and striped rings know a causal mask only."""
        return (True, False) if layout == "contiguous" else (True,)

    def degree_refusals(self, cell: Cell) -> list[str]:
        """In a ring of one rank the package sends to itself, which gloo cannot do."""
        if cell.sp_degree == 1 and cell.cluster.backend == "gloo":
            return ["sp_degree=1 is not for ring_flash_attn on gloo; take strategy=local"]
        return super().degree_refusals(cell)


def rounding_refusals(cell: Cell) -> list[str]:
    """The contiguous ring returns the gradient of Q as bf16, whatever the inputs are."""
    if cell.layout != "contiguous" or cell.dtype != "fp16":
        return []
    who = f"{cell.strategy} in contiguous layout"
    return [f"dtype=fp16 is not for {who}, which rounds dq to bf16; take dtype=bf16, or layout=zigzag"]
