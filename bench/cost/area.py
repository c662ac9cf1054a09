"""How much of the causal triangle each rank computes: what a layout balances or does not."""

from __future__ import annotations

from bench.attention.documents import Documents, keys_seen
from bench.attention.layouts import LAYOUTS
from bench.config import RunConfig


def causal_area(cell: RunConfig, group_rank: int) -> int:
    """(Query, key, head) triples that the causal mask leaves a rank, of one sequence and layer.

    Ranks that share heads hold the same queries once heads are exchanged; those of a ring keep their own
    and see all keys. A query at position p sees p + 1 keys.
    """
    pairs = sum(keys_seen(range(cell.padded_len)[piece]) for piece in _queries(cell, group_rank))
    return pairs * (cell.model.num_heads // cell.ulysses_degree)


def packed_area(cell: RunConfig, documents: Documents, group_rank: int) -> int:
    """Pairs of a query and a key of all sequences of a batch, where attention stays within documents."""
    return documents.causal_pairs(_queries(cell, group_rank)) * (cell.model.num_heads // cell.ulysses_degree)


def _queries(cell: RunConfig, group_rank: int) -> tuple[slice, ...]:
    return LAYOUTS[cell.layout].slices(cell.padded_len, cell.ring_degree, cell.ring_rank(group_rank))
