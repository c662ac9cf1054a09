"""The ring-flash-attn package: K and V are sent apart, and their gradients one hop further than by ours."""

from __future__ import annotations

from bench.attention.kernel_facts import HALF
from bench.config import RunConfig
from bench.strategies.ring.facts import Ring


class RingFlashAttn(Ring):
    name = "ring_flash_attn"
    packs = False
    first_gradients_wait = False
    why_it_packs_not = (
        "the functions of its layouts take no boundaries, and its varlen ones want each"
        " document's length to be a multiple of sp_degree"
    )
    package = "ring-flash-attn"
    calls_flash_attn = True
    dtypes = HALF  # as flash-attn

    def counterpart(self, cell: RunConfig) -> str | None:  # noqa: ARG002
        return "ring"

    def causal_masks(self, layout: str) -> tuple[bool, ...]:
        """The package's zigzag and striped rings know a causal mask only."""
        return (True, False) if layout == "contiguous" else (True,)

    def degree_refusals(self, cell: RunConfig) -> list[str]:
        """In a ring of one rank the package sends to itself, which gloo cannot do."""
        if cell.sp_degree == 1 and cell.cluster.backend == "gloo":
            return ["sp_degree=1 is not for ring_flash_attn on gloo; take strategy=local"]
        return super().degree_refusals(cell)
