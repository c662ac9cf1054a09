"""Our Ulysses: one all-to-all for Q, K and V before attention, one for the output after it."""

from __future__ import annotations

from bench.config import ModelConfig, RunConfig
from bench.strategies.facts import (
    Facts,
    backwards_per_step,
    exchanged_kv_heads,
    forwards_per_step,
    head_exchange_bytes,
    head_exchange_refusals,
)


class Ulysses(Facts):
    name = "ulysses"
    packs = True
    kept_copies = (1, 0)

    def ulysses_degree(self, sp_degree: int, model: ModelConfig) -> int:  # noqa: ARG002
        return sp_degree

    def head_refusals(self, cell: RunConfig) -> list[str]:
        return head_exchange_refusals(cell)

    def exchange_bytes(self, cell: RunConfig) -> int:
        """(P-1)/P of Q, K, V and the output per pass, forward and backward alike (arXiv:2309.14509, 3.2)."""
        heads = 2 * cell.model.num_heads + 2 * exchanged_kv_heads(cell)
        passes = forwards_per_step(cell) + backwards_per_step(cell)
        return head_exchange_bytes(cell, heads) * passes
