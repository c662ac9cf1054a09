"""yunchang's `UlyssesAttention`: four all-to-alls a pass, of Q, K, V and the output."""

from __future__ import annotations

from bench.config import RunConfig
from bench.strategies.facts import NOT_ASKED, head_exchange_refusals
from bench.strategies.schedule import Schedule, Stage, whole_block
from bench.strategies.ulysses.facts import Ulysses, exchange_heads


class YunchangUlysses(Ulysses):
    name = "yunchang_ulysses"
    packs = False
    packing_is = NOT_ASKED
    why_it_packs_not = "yunchang's UlyssesAttention takes no boundaries of documents"
    package = "yunchang"
    calls_flash_attn = True
    tried = "0.6.4"

    def counterpart(self, cell: RunConfig) -> str | None:  # noqa: ARG002
        return "ulysses"

    def head_refusals(self, cell: RunConfig) -> list[str]:
        return head_exchange_refusals(cell, repeats=False)

    def schedule(self, cell: RunConfig) -> Schedule:
        """The bytes of `ulysses`, each tensor by itself."""
        heads, kv_heads = cell.model.num_heads, cell.model.num_kv_heads
        attention = Stage((whole_block(cell, heads // cell.ulysses_degree, kv_heads // cell.ulysses_degree),))
        q, kv = exchange_heads(cell, heads), exchange_heads(cell, kv_heads)
        return Schedule(forward=(q, kv, kv, attention, q), backward=(q, attention, kv, kv, q))
