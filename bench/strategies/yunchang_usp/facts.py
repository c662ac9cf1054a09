"""yunchang's `LongContextAttention`: USP (arXiv:2405.07719) by those who published it."""

from __future__ import annotations

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
    takes_fewer_kv_heads = False
    packs = False
    kept_copies = (1, 0)
    first_gradients_wait = YunchangRingFacts.first_gradients_wait
    why_it_packs_not = "yunchang's LongContextAttention takes no boundaries of documents"
    package = "yunchang"
    tried = YunchangRingFacts.tried
    dtypes = YunchangRingFacts.dtypes

    def ulysses_degree(self, sp_degree: int, model: ModelConfig) -> int:
        """Such that there is a ring, where there can be: of one rank its backward sends to itself."""
        degree = super().ulysses_degree(sp_degree, model)
        return degree // 2 if degree == sp_degree > 1 else degree

    def refusals(self, cell: Cell) -> list[str]:
        return [*super().refusals(cell), *rounding_refusals(cell)]

    def causal_masks(self, layout: str) -> tuple[bool, ...]:
        return YunchangRingFacts().causal_masks(layout)

    def degree_refusals(self, cell: Cell) -> list[str]:
        """In a ring of one rank the package sends to itself, which gloo cannot do."""
        refused = super().degree_refusals(cell)
        if not refused and cell.ring_degree == 1 and cell.cluster.backend == "gloo":
            way_out = "take strategy=yunchang_ulysses, or a smaller ulysses_degree"
            return [
                f"ulysses_degree={cell.ulysses_degree} leaves yunchang_usp a ring of one on gloo; {way_out}"
            ]
        return refused

    def schedule(self, cell: Cell) -> Schedule:
        """Both: four all-to-alls a pass, and a ring over longer shards of fewer heads."""
        ring, heads = super().schedule(cell), YunchangUlyssesFacts().schedule(cell)
        return Schedule(
            forward=(*heads.forward[:3], *ring.forward[1:-1], heads.forward[-1]),
            backward=(heads.backward[0], *ring.backward[1:-1], *heads.backward[2:]),
        )
