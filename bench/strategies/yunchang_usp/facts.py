"""Facts of yunchang's `LongContextAttention`, USP (arXiv:2405.07719) by its authors."""

from __future__ import annotations

from bench.attention.kernel_facts import FLASH_ATTN
from bench.config import Cell, ModelConfig
from bench.strategies.plot_style import PlotStyle
from bench.strategies.ring_flash_attn.facts import rounding_refusals
from bench.strategies.schedule import Schedule
from bench.strategies.usp.facts import USPFacts
from bench.strategies.yunchang_ring.facts import YunchangRingFacts
from bench.strategies.yunchang_ulysses.facts import YunchangUlyssesFacts


class YunchangUSPFacts(USPFacts):
    name = "yunchang_usp"
    style = PlotStyle("#661100", (7, 1, 0), "-.")
    repeats_kv_heads = False
    supports_documents = False
    saved_copies = (1, 0)
    keeps_local_gradients = YunchangRingFacts.keeps_local_gradients
    no_documents_reason = "yunchang's LongContextAttention does not take document boundaries"
    package = "yunchang"
    flash_attn_kernels = (FLASH_ATTN,)
    tested_version = YunchangRingFacts.tested_version
    dtypes = YunchangRingFacts.dtypes

    def ulysses_degree(self, sp_degree: int, model: ModelConfig) -> int:
        """Return the degree of `usp`, halved if the ring had one rank, which would send to itself."""
        degree = super().ulysses_degree(sp_degree, model)
        return degree // 2 if degree == sp_degree > 1 else degree

    def refusals(self, cell: Cell) -> list[str]:
        return [*super().refusals(cell), *rounding_refusals(cell)]

    def causal_masks(self, layout: str) -> tuple[bool, ...]:
        return YunchangRingFacts().causal_masks(layout)

    def degree_refusals(self, cell: Cell) -> list[str]:
        """Return the reasons against the degree, such as a ring of one rank; gloo cannot send to itself."""
        refusals = super().degree_refusals(cell)
        if not refusals and cell.ring_degree == 1 and cell.cluster.backend == "gloo":
            way_out = "take strategy=yunchang_ulysses, or a smaller ulysses_degree"
            degree = f"ulysses_degree={cell.ulysses_degree}"
            return [f"{degree} leaves yunchang_usp a ring of one rank, which gloo cannot run; {way_out}"]
        return refusals

    def schedule(self, cell: Cell) -> Schedule:
        """Return the all-to-alls of `yunchang_ulysses` around a ring over longer shards of fewer heads."""
        usp, ulysses = super().schedule(cell), YunchangUlyssesFacts().schedule(cell)
        return Schedule(
            forward=(*ulysses.forward[:3], *usp.forward[1:-1], ulysses.forward[-1]),
            backward=(ulysses.backward[0], *usp.backward[1:-1], *ulysses.backward[2:]),
        )
